"""The orders of the lanes' benchmark, and the run they belong to. They are published by `lanes.py`."""

import numpy as np

from storage.run import Run, RunSpec, Sampling, StatesMode
from storage.tokens import prompt_id
from workers.broker.messages import Generate

SPEC = RunSpec(
    model="paced",
    tokenizer_digest="",
    template_digest="",
    vocab_size=32_000,
    sampling=Sampling(),
    short_max_tokens=1024,
    long_max_tokens=2048,
    states=StatesMode.OFF,
    capture=None,
)
RUN = Run(id="b" * 32, spec=SPEC)


def orders(lane: str, count: int, tokens: int) -> list[Generate]:
    """Orders whose ids are as skewed as text is, so that they compress like real ones."""
    rng = np.random.default_rng(len(lane))
    made = []
    for number in range(count):
        prompt = (rng.zipf(1.3, tokens) % 31_990 + 5).astype(np.int32)
        prompt[0] = number % 30_000
        made.append(
            Generate(
                run=RUN.id,
                id=prompt_id(lane, prompt, occurrence=number),
                dataset=lane,
                lane=lane,
                prompt=prompt,
                spans=(),
                max_new_tokens=512,
            )
        )
    return made
