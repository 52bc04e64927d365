"""The ways of starting SGLang that the suite uses: each its flags, and why."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

STATES = "--enable-return-hidden-states"
WHOLE_PREFILLS = ("--chunked-prefill-size", "-1")
TIGHT = ("--max-total-tokens", "1500", "--schedule-conservativeness", "0.01")
"""Memory for a dozen requests, given away as if responses were short: requests are retracted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavour:
    """One way of starting the server."""

    name: str
    flags: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


FINAL = Flavour(name="final", flags=(STATES, *WHOLE_PREFILLS))
"""Stock, as the README says to start it, with its prefix cache on: the final state."""
RETRACTING = Flavour(name="retracting", flags=(STATES, *WHOLE_PREFILLS, *TIGHT))
"""Stock, and takes requests back in the middle."""
CHUNKING = Flavour(name="chunking", flags=(STATES, "--chunked-prefill-size", "64", *TIGHT))
"""Stock, and does everything that loses rows: chunks, retracts and caches."""
AUX_ON_TWO_RANKS = Flavour(
    name="aux-dp2",
    flags=(
        *(STATES, *WHOLE_PREFILLS, "--dp-size", "2"),
        *("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"),
    ),
    # SGLang wants to be told which cores a rank has where there are fewer NUMA nodes than ranks.
    environ={"SGLANG_CPU_OMP_THREADS_BIND": f"{min(os.sched_getaffinity(0))}|{max(os.sched_getaffinity(0))}"},
)
"""Stock, EAGLE-3's three layers in place of the final state, from two data-parallel ranks."""
