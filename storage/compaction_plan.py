"""Which segments are worth merging, and with which: sizes and counts in, groups out. Reads no files.

`storage compact` makes few segments of all small ones. A sink tends to its own as they come: by
tiers of size, so that what it merged is not merged again with every handful of new ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TARGET_BYTES = {"responses": 256 << 20, "failures": 256 << 20, "states": 1 << 30}
"""Kind → how big a merged segment may get, as stored."""
SMALL = 4
"""A segment below this fraction of the target (one in so many) is small."""
WASTE = 8
"""A segment of which at least one row in so many can be dropped is written again for that alone."""
MANY = 64
"""Small segments of one tier that a sink leaves as they are."""
TIER = 64
"""How many times a tier's segments are bigger than those of the tier below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is known of a visible segment."""

    name: str
    size_bytes: int
    """As stored."""
    rows: int
    dropped: int
    """Rows that need not be kept."""
    alike: str
    """Only segments with the same words here can be merged."""


Group = tuple[str, ...]
"""Names of the segments to merge into one."""


def worth_merging(candidates: Iterable[Candidate], target_bytes: int) -> list[Group]:
    """Groups of small segments, none bigger than the target, and those that hold much to drop.

    What comes out is not small, but for the last of its kind: the same again finds nothing to do.
    """
    groups = []
    for one in _by_kind(candidates):
        picked = [
            c for c in one if c.size_bytes < target_bytes // SMALL or c.dropped * WASTE >= max(1, c.rows)
        ]
        filled = _filled(picked, target_bytes)
        groups += [tuple(c.name for c in g) for g in filled if len(g) > 1 or any(c.dropped for c in g)]
    return groups


def past_many(candidates: Iterable[Candidate], target_bytes: int) -> list[Group]:
    """Groups of small segments, tier by tier where there are more than `MANY` in one.

    What comes out of a tier lies in the next or, where all were tiny, further up in the same. So
    a byte is written again about once a tier, of which there are two.
    """
    groups = []
    small = target_bytes // SMALL
    for one in _by_kind(candidates):
        for least, below in ((0, small // TIER), (small // TIER, small)):
            tier = [c for c in one if least <= c.size_bytes < below]
            if len(tier) > MANY:
                groups += [tuple(c.name for c in g) for g in _filled(tier, target_bytes) if len(g) > 1]
    return groups


def _by_kind(candidates: Iterable[Candidate]) -> Iterable[list[Candidate]]:
    kinds: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        kinds.setdefault(candidate.alike, []).append(candidate)
    return kinds.values()


def _filled(candidates: Sequence[Candidate], target_bytes: int) -> list[list[Candidate]]:
    """The candidates in their order, cut where the target would be passed."""
    groups: list[list[Candidate]] = []
    size = 0
    for candidate in candidates:
        if not groups or size + candidate.size_bytes > target_bytes:
            groups.append([])
            size = 0
        groups[-1].append(candidate)
        size += candidate.size_bytes
    return groups
