"""A seeded schedule: which fault comes next and when; now and then two at once."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.faults import (
    bad_messages,
    bad_servers,
    clocks,
    compacting,
    full_disks,
    killing,
    lost_nodes,
    redis_away,
)
from tests.faults.cluster import Cluster
from tests.faults.fault import Fault

GAP_S = (1.0, 12.0)
"""Between the recovery from one fault and the next."""
TWO_AT_ONCE = 0.2
"""Share of the faults that get company."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What comes next."""

    faults: tuple[Fault, ...]
    after_s: float
    seed: int
    """For the dice of these faults alone: what one throws does not depend on how long another took."""


def all_faults(cluster: Cluster, spared: frozenset[str] = frozenset()) -> list[Fault]:
    """Every fault that this cluster can suffer."""
    return [
        *killing.all_faults(cluster, spared),
        *redis_away.all_faults(),
        *bad_servers.all_faults(cluster),
        *full_disks.all_faults(cluster),
        *bad_messages.all_faults(),
        *compacting.all_faults(),
        *lost_nodes.all_faults(cluster, spared),
        *clocks.all_faults(cluster),
    ]


def schedule(faults: Sequence[Fault], seed: int) -> Iterator[Drawn]:
    """Faults without end: each once before any comes again, then by weight."""
    dice = random.Random(seed)
    first = list(faults)
    dice.shuffle(first)
    while True:
        one = first.pop() if first else dice.choices(faults, [f.weight for f in faults])[0]
        drawn = [one]
        if dice.random() < TWO_AT_ONCE:
            other = dice.choice(faults)
            # two outages of one thing are one, and a folder cannot be away twice
            if other.victim != one.victim and family(other) != family(one):
                drawn.append(other)
        yield Drawn(faults=tuple(drawn), after_s=dice.uniform(*GAP_S), seed=dice.getrandbits(32))


def family(fault: Fault) -> str:
    """Its first word: `SIGKILL`, `Redis`, `server` …; signals are one family, as is Redis by any name."""
    word = fault.kind.split()[0]
    if word.startswith("SIG"):
        return "signal"
    return "Redis" if "Redis" in fault.kind or "clients" in fault.kind else word
