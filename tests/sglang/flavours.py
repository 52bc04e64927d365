"""The ways of starting SGLang that the suite uses: each its flags, and why."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

STATES = "--enable-return-hidden-states"
WHOLE_PREFILLS = ("--chunked-prefill-size", "-1")
AUXILIARY = ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3")
TIGHT = ("--max-total-tokens", "2100", "--schedule-conservativeness", "0.01")
"""Memory for a dozen requests, given away as if responses were short: requests are retracted."""
HOPEFUL = {"SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "4"}
"""After a retraction it believes in short responses again at once, and retracts more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavour:
    """One way of starting the server."""

    name: str
    flags: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    recipe: Path | None = None
    """A script of ops/sglang that starts it; None for `python -m sglang.launch_server`."""


FINAL = Flavour(name="final", flags=(STATES, *WHOLE_PREFILLS, *TIGHT), environ=HOPEFUL)
"""Stock, as the README says to start it, but with its prefix cache on and too little memory."""
CHUNKING = Flavour(
    name="chunking",
    flags=(STATES, "--chunked-prefill-size", "64", "--max-running-requests", "64"),
    # SGLang's own switch for tests: a request is taken back every so many steps, memory or not.
    environ={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"},
)
"""Stock, and does everything that loses rows: chunks, retracts and caches."""
AUX_ON_TWO_RANKS = Flavour(
    name="aux-dp2",
    flags=(STATES, *WHOLE_PREFILLS, *AUXILIARY, "--dp-size", "2"),
    # SGLang wants to be told which cores a rank has where there are fewer NUMA nodes than ranks.
    environ={"SGLANG_CPU_OMP_THREADS_BIND": f"0|{(os.cpu_count() or 1) - 1}"},
)
"""Stock, EAGLE-3's three layers in place of the final state, from two data-parallel ranks."""
CHUNKING_EAGLE3 = Flavour(name="plugin", flags=(*CHUNKING.flags, *AUXILIARY), environ=CHUNKING.environ)
"""To be started with the plugin: chunks, retracts and caches, and has the layers beside the final state."""
RECIPES = Path(__file__).parents[2] / "ops" / "sglang"
GENERATE = Flavour(name="generate", flags=(), recipe=RECIPES / "generate.sh")
CAPTURE = Flavour(name="capture", flags=(), recipe=RECIPES / "capture.sh")
"""To be started with the plugin. Both as a person starts them, with what a CPU needs added."""
