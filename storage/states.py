"""Hidden states from the spool into a segment's arrays, streamed. Committing is `store.py`'s.

`id`, `digest` uint8 [N, 16] · `offset` int64 [N + 1] into `states` uint16 [ΣT, L, H] (bf16 bits,
rows aligned with tokens) · `crc32` uint32 [N] over a sample's raw bytes · `facts` uint16 [N], a
place in the attribute `facts`. Attributes: `dtype`, `hs_indices`, `norm`, `facts`, and `checks` of the
few samples that were checked (`checks.py`).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from storage.checks import ATTRIBUTE, checks_of
from storage.columns import ids_array, numbered, offsets
from storage.errors import SpoolLostError
from storage.sample import SpoolRef, States
from storage.segment import Segment, Staging
from storage.shard import ShardWriter
from storage.spool import BUFFER_BYTES, NOT_LOOKED, Spool, ValueCheck, check_values


class SamplesLostError(SpoolLostError):
    """Which of a batch cannot be stored: it is written again without them."""

    def __init__(self, lost: Sequence[States], unfit: Sequence[tuple[States, str]]) -> None:
        super().__init__(f"`{len(lost) + len(unfit)}` spool files cannot be stored", code="spool.lost")
        self.lost = tuple(lost)
        """Those that do not match their checksums."""
        self.unfit = tuple(unfit)
        """Those whose values no forward pass gives, each with its code."""


class _UnfitError(SpoolLostError):
    """Values that no forward pass gives."""


def alike(states: States) -> tuple[object, ...]:
    """What the samples of one segment must have in common."""
    return (states.capture, states.hs_indices, states.norm, states.spool.shape[1:])


def stage_states(staging: Staging, batch: Sequence[States], spool: Spool) -> None:
    """Stream the samples, all `alike`, into a staging folder, complete and durable.

    Each tensor is read once, straight into the chunk that is encoded, and checked as it passes: a
    lane sees only the values in its own node's spool. Raises `SamplesLostError` for all that are
    lost, damaged or unfit; nothing of this staging folder may be committed then. After the first
    of them nothing more is written, only checked.
    """
    layers, hidden = batch[0].spool.shape[1:]
    lengths = [states.spool.shape[0] for states in batch]
    facts, facts_place = numbered([states.facts_id for states in batch])
    lost: list[States] = []
    unfit: list[tuple[States, str]] = []
    with staging.stream("states", (sum(lengths), layers, hidden)) as writer:
        for states in batch:
            try:
                if lost or unfit:
                    _refuse_unfit(spool.check_values(states.spool), states.spool)
                else:
                    _fill(writer, states.spool, spool)
            except _UnfitError as error:
                unfit.append((states, error.code))
            except SpoolLostError:
                lost.append(states)
        if lost or unfit:
            raise SamplesLostError(lost, unfit)
        writer.close()
    staging.plain("id", ids_array([states.id for states in batch]))
    staging.plain("digest", ids_array([states.digest for states in batch]))
    staging.plain("offset", offsets(lengths))
    staging.plain("crc32", np.array([states.spool.crc32 for states in batch], np.uint32))
    staging.plain("facts", facts_place)
    staging.finish(
        {
            "samples": len(batch),
            "dtype": "bfloat16 bits as uint16",
            "hs_indices": list(batch[0].hs_indices),
            "norm": batch[0].norm,
            "facts": facts,
            ATTRIBUTE: checks_of(batch),
        }
    )


def split_readable(batch: Sequence[States], spool: Spool) -> tuple[list[States], list[States]]:
    """Those whose spool files are there, of their size and with their header; and the others.

    Cheap, since no tensor is read: what has been swept or lost is found before anything is written.
    """
    readable: list[States] = []
    missing: list[States] = []
    for states in batch:
        try:
            with spool.reader(states.spool):
                readable.append(states)
        except SpoolLostError:
            missing.append(states)
    return readable, missing


def _fill(writer: ShardWriter, ref: SpoolRef, spool: Spool) -> None:
    """Read one tensor into the writer's chunks; raises `SpoolLostError`."""
    left, layers, hidden = ref.shape
    values = NOT_LOOKED
    block = max(1, BUFFER_BYTES // (layers * hidden * 2))
    with spool.reader(ref) as reader:
        while left:
            rows = writer.room(min(left, block))
            reader.readinto(rows)
            values += check_values(rows)
            writer.advance(len(rows))
            left -= len(rows)
        reader.check()
    _refuse_unfit(values, ref)


def _refuse_unfit(found: ValueCheck, ref: SpoolRef) -> None:
    if not found.ok:
        code = "states.not_finite" if found.non_finite else "states.zero"
        raise _UnfitError(f"spool file `{ref.name}`: {found}", code=code)


class StatesColumns:
    """A segment's states for reading: the offsets in memory, the tensors on demand."""

    def __init__(self, segment: Segment) -> None:
        """Read the columns; raises as `ArrayFile.read` does."""
        self.offset: NDArray[np.int64] = segment.column("offset")
        self.states = segment.array("states")

    def read(self, row: int) -> NDArray[np.uint16]:
        """The sample in this row, uint16 [T, L, H]."""
        return self.states.read(*self.offset[row : row + 2])
