"""The window: which orders are published and not stored yet, in Redis and by position in memory.

An order enters before it is published, so a crash in between leaves one that is in the window and
in no queue: reconciliation finds it. It leaves when the store shows its result, or when a sink
found its states lost. What enters is decided in `feeder.py`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from redis import Redis

from storage.idtable import ABSENT, IdTable
from storage.index import DatasetIndex
from storage.sample import Stage
from storage.tokens import ID_BYTES
from workers.broker.keys import STAGE_BYTES, WINDOW, window_field

BITS = {Stage.GENERATE: 1, Stage.CAPTURE: 2}
"""Stage → its bit in the arrays of what is out."""
CHUNK = 2000
"""Fields in one command."""


class Window:
    """One run's window. Others may remove entries in Redis; `refresh` notices."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._out: dict[str, NDArray[np.uint8]] = {}
        self._count = 0
        self._loaded = False

    def __len__(self) -> int:
        """Orders published and not stored yet."""
        return self._count

    def out(self, dataset: str) -> NDArray[np.uint8]:
        """Per prompt of the dataset, the bits of the stages that are out; not to be written to."""
        return self._out[dataset]

    def refresh(self, datasets: Mapping[str, DatasetIndex]) -> bool:
        """Follow the datasets as they grow and Redis as others change it; whether these did.

        One short command when they did not.
        """
        for name, dataset in datasets.items():
            out = self._out.get(name, np.zeros(0, np.uint8))
            if name not in self._out or len(out) != len(dataset):
                self._out[name] = np.concatenate([out, np.zeros(len(dataset) - len(out), np.uint8)])
        if self._loaded and self._redis.hlen(WINDOW) == self._count:
            return False
        self._load(datasets)
        return True

    def add(self, dataset: DatasetIndex, positions: Sequence[int], stage: Stage) -> None:
        """Enter orders that are not in it, in Redis first."""
        for first in range(0, len(positions), CHUNK):
            fields = [_field(dataset, at, stage) for at in positions[first : first + CHUNK]]
            self._redis.hset(WINDOW, items=[part for field in fields for part in (field, dataset.name)])
        self._out[dataset.name][list(positions)] |= BITS[stage]
        self._count += len(positions)

    def remove(self, dataset: DatasetIndex, positions: Sequence[int], stage: Stage) -> None:
        """Take out orders that are in it."""
        for first in range(0, len(positions), CHUNK):
            fields = [_field(dataset, at, stage) for at in positions[first : first + CHUNK]]
            self._redis.hdel(WINDOW, *fields)
        self._out[dataset.name][list(positions)] &= 0xFF ^ BITS[stage]
        self._count -= len(positions)

    def _load(self, datasets: Mapping[str, DatasetIndex]) -> None:
        """Take over what is in Redis: after a change of the feeder, or of the window by others."""
        keys = [field if isinstance(field, bytes) else field.encode() for field in self._redis.hkeys(WINDOW)]
        ours: set[bytes] = set()
        for stage, byte in STAGE_BYTES.items():
            bit = BITS[Stage(stage)]
            ids = [key[:ID_BYTES] for key in keys if len(key) == ID_BYTES + 1 and key.endswith(byte)]
            table = IdTable()
            table.add(_rows(ids), np.arange(len(ids), dtype=np.int64))
            for name, dataset in datasets.items():
                out = self._out[name]
                out &= 0xFF ^ bit
                found = table.find(dataset.id_rows)
                out[found != ABSENT] |= bit
                ours.update(ids[at] + byte for at in found[found != ABSENT])
        # Of prompts that this store does not have: nothing would ever take them out.
        strange = [key for key in keys if key not in ours]
        for first in range(0, len(strange), CHUNK):
            self._redis.hdel(WINDOW, *strange[first : first + CHUNK])
        self._count = len(ours)
        self._loaded = True


def _field(dataset: DatasetIndex, position: int, stage: Stage) -> bytes:
    return window_field(dataset.id_rows[position].tobytes(), stage)


def _rows(ids: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(ids), np.uint8).reshape(-1, ID_BYTES)
