"""The embedded engine: a small Llama in NumPy behind SGLang's HTTP contract, for machines without a GPU.

Importing this costs nothing; NumPy comes with the first call, so that `__main__` can set the number
of BLAS threads before it.
"""

from pathlib import Path


def tiny_model_dir() -> Path:
    """A folder with the bundled tiny model, complete: config, tokenizer, template and weights.

    The weights are made from a seed the first time (a second) and kept in the user's cache folder.
    """
    from workers.engine.tiny_model import make_tiny_model

    return make_tiny_model()
