"""The bundled tiny model: its weights out of a seed, and a cache folder that holds it complete.

Random weights, so its words mean nothing; its sizes, tokenizer and template behave like a real
model's. Every machine makes the same bytes: Philox's raw stream is specified, and only integers and
powers of two touch it before the rounding to bfloat16.
"""

import hashlib
import os
import shutil
import tempfile
from importlib import resources
from pathlib import Path

import numpy as np

from workers.engine.bf16 import Bits, rounded, to_bits
from workers.engine.model_config import ModelConfig, read_config
from workers.engine.safetensors_file import write_tensors

SEED = 64
RECIPE = 1
"""Raised whenever `make_weights` makes other bytes: caches of the old ones are not taken."""
NAME = "eyas-tiny-llama"


def make_tiny_model(cache: Path | None = None) -> Path:
    """The folder with the complete model, made on the first call.

    It appears by a rename, so processes that make it at once end with one whole folder.
    """
    source = Path(str(resources.files("workers.engine") / "tiny"))
    files = sorted(file for file in source.iterdir() if file.suffix in (".json", ".jinja"))
    digest = hashlib.blake2b(f"{SEED} {RECIPE}".encode(), digest_size=6)
    for file in files:
        digest.update(file.read_bytes())
    folder = (cache or _cache_folder()) / f"{NAME}-{digest.hexdigest()}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        making.chmod(0o755)
        for file in files:
            shutil.copyfile(file, making / file.name)
        write_tensors(making / "model.safetensors", make_weights(read_config(making)))
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _cache_folder() -> Path:
    """`$XDG_CACHE_HOME/eyas` or the home's, and a temporary one where neither can be written."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        (home / "eyas").mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"eyas-cache-{os.getuid()}"
    return home / "eyas"


def make_weights(config: ModelConfig) -> dict[str, Bits]:
    """Bell-shaped weights by name, as bfloat16 bits.

    Deviations are chosen so that the states of every layer differ and depend on the whole prompt, and
    so that the output is neither flat nor one token: logits deviate by about 2.5. Norm weights are not
    1, so that a state taken on the wrong side of the final norm shows.
    """
    raw = np.random.Philox(key=SEED)

    def bell(*shape: int, deviation: float) -> Bits:
        draws = np.asarray(raw.random_raw((int(np.prod(shape)) + 1) // 2), dtype="<u8")
        quarters = draws.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.int64) - 510
        unit = quarters[: int(np.prod(shape))] / 148.0  # four bytes' sum deviates by 147.8
        return to_bits(rounded(unit * deviation)).reshape(shape)

    def near_one(size: int) -> Bits:
        draws = np.asarray(raw.random_raw(size), dtype="<u8") >> np.uint64(58)
        return to_bits(rounded(0.5 + draws.astype(np.float64) / 64.0))

    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fan = hidden**-0.5
    weights = {"model.embed_tokens.weight": bell(config.vocab_size, hidden, deviation=1.0)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = near_one(hidden)
        weights[f"{prefix}.self_attn.q_proj.weight"] = bell(queries, hidden, deviation=fan)
        weights[f"{prefix}.self_attn.k_proj.weight"] = bell(keys, hidden, deviation=fan)
        weights[f"{prefix}.self_attn.v_proj.weight"] = bell(keys, hidden, deviation=fan)
        weights[f"{prefix}.self_attn.o_proj.weight"] = bell(hidden, queries, deviation=queries**-0.5)
        weights[f"{prefix}.post_attention_layernorm.weight"] = near_one(hidden)
        weights[f"{prefix}.mlp.gate_proj.weight"] = bell(inner, hidden, deviation=fan)
        weights[f"{prefix}.mlp.up_proj.weight"] = bell(inner, hidden, deviation=fan)
        weights[f"{prefix}.mlp.down_proj.weight"] = bell(hidden, inner, deviation=inner**-0.5)
    weights["model.norm.weight"] = near_one(hidden)
    weights["lm_head.weight"] = bell(config.vocab_size, hidden, deviation=2.5 * fan)
    return weights
