"""Keys and values of the running sequences, packed so that decoding touches no gaps and copies nothing.

Sequences of similar length share a pool, whose first `count` rows are the running ones. Owners are
whatever the caller keeps per sequence; nothing here looks into them.
"""

from typing import Generic, TypeVar

import numpy as np

from workers.engine.bf16 import Floats
from workers.engine.model_config import ModelConfig

Owner = TypeVar("Owner")

CAPACITIES = (104, 168, 232, 296, 424, 552, 1064, 2088, 4136, 8232, 16424, 32808, 131112, 1 << 20)
"""Tokens a row of each pool can hold. A product runs over a pool's longest sequence, so steps are small
where most sequences are; each pool costs its own calls a layer, so there are not more. 8 above multiples
of 64: rows a power of two apart would share cache lines."""
KEPT_CAPACITY = 552
"""Pools of longer rows give their memory back when they are empty."""


class Pool(Generic[Owner]):
    """Rows of one capacity, for all layers."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.capacity = capacity
        self.owners: list[Owner] = []
        """Whose sequence each row is, in order."""
        self.lengths = np.zeros(0, np.int64)
        """Tokens of each row; the first `count` matter."""
        self._config = config
        self._keys = self._empty(0, config.head_dim, capacity)
        self._values = self._empty(0, capacity, config.head_dim)
        self._beyond: Floats | None = None

    @property
    def count(self) -> int:
        """Running sequences."""
        return len(self.owners)

    def _empty(self, rows: int, *shape: int) -> Floats:
        # Zeros, not garbage: a row's unused end is multiplied by weights of 0, and 0 · NaN is NaN.
        return np.zeros((self._config.num_layers, rows, self._config.num_kv_heads, *shape))

    def add(self, owner: Owner, keys: Floats, values: Floats) -> None:
        """Append a sequence: keys [layers, kv, D, T], values [layers, kv, T, D]."""
        if self.count == len(self.lengths):
            self._grow()
        row, length = self.count, keys.shape[-1]
        self._keys[:, row, :, :, :length] = keys
        self._values[:, row, :, :length] = values
        self.lengths[row] = length
        self.owners.append(owner)

    def _grow(self) -> None:
        rows = max(4, 2 * len(self.lengths))
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = self._empty(rows, *old.shape[3:])
            new[:, : self.count] = old[:, : self.count]
            setattr(self, name, new)
        self.lengths = np.concatenate((self.lengths, np.zeros(rows - len(self.lengths), np.int64)))

    def row(self, row: int) -> tuple[Floats, Floats]:
        """Keys and values of one sequence, as `add` takes them; views."""
        length = int(self.lengths[row])
        return self._keys[:, row, :, :, :length], self._values[:, row, :, :length]

    def remove(self, row: int) -> None:
        """Forget a sequence; the last one takes its row."""
        last = self.count - 1
        if row != last:
            length = int(self.lengths[last])
            self._keys[:, row, :, :, :length] = self._keys[:, last, :, :, :length]
            self._values[:, row, :, :length] = self._values[:, last, :, :length]
            self.lengths[row] = length
            self.owners[row] = self.owners[last]
        self.owners.pop()

    def append(self, layer: int, key: Floats, value: Floats) -> tuple[Floats, Floats, Floats]:
        """Write the newest token's key and value [B, kv, D] of one layer, at `lengths - 1`.

        Returns keys [B, kv, D, T], values [B, kv, T, D] and what to add to scores [B, 1, 1, T]: -inf
        beyond each row's length. T is the longest length.
        """
        count = self.count
        rows, lengths = np.arange(count), self.lengths[:count]
        longest = int(lengths.max())
        if layer == 0:
            outside = np.arange(longest)[None, :] >= lengths[:, None]
            self._beyond = np.where(outside, -np.inf, 0.0)[:, None, None, :]
        assert self._beyond is not None
        keys, values = self._keys[layer], self._values[layer]
        keys[rows, :, :, lengths - 1] = key
        values[rows, :, lengths - 1] = value
        return keys[:count, :, :, :longest], values[:count, :, :longest], self._beyond


class Pools(Generic[Owner]):
    """All running sequences, each in the smallest pool with room for its next token."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._pools: dict[int, Pool[Owner]] = {}

    def add(self, owner: Owner, keys: Floats, values: Floats) -> None:
        """Take in a sequence: keys [layers, kv, D, T], values [layers, kv, T, D]."""
        capacity = next(size for size in CAPACITIES if size > keys.shape[-1])
        if capacity not in self._pools:
            self._pools[capacity] = Pool(self._config, capacity)
        self._pools[capacity].add(owner, keys, values)

    def remove(self, owner: Owner) -> None:
        """Forget a sequence."""
        for pool in self._pools.values():
            if owner in pool.owners:
                pool.remove(pool.owners.index(owner))
                return

    def in_use(self) -> list[Pool[Owner]]:
        """The pools with running sequences, each with room for one more token a row.

        Empty pools of long rows give their memory back.
        """
        for pool in list(self._pools.values()):
            full = np.flatnonzero(pool.lengths[: pool.count] == pool.capacity)
            for row in full[::-1].tolist():
                self.add(pool.owners[row], *pool.row(row))
                pool.remove(row)
        for capacity in [
            size for size, pool in self._pools.items() if not pool.count and size > KEPT_CAPACITY
        ]:
            del self._pools[capacity]
        return [pool for _, pool in sorted(self._pools.items()) if pool.count]
