"""Dead letters counted by their code, followed as they are committed.

Only those count that still stand: a response beats a failure to generate, states beat a failure
to capture. Which prompts are dead is `index.py`'s answer.
"""

from collections import Counter

from storage.catalog import Catalog
from storage.columns import ids_list
from storage.dataset_index import DatasetIndex, Outcome
from storage.segment import Segment
from storage.store import Store


class DeadLetters:
    """The codes of a store's dead letters. Not for two threads at once."""

    def __init__(self, store: Store) -> None:
        self._catalog = Catalog(store.path / "failures")
        self._codes: dict[bytes, str] = {}

    def by_code(self, dataset: DatasetIndex, first: int | None = None) -> dict[str, int]:
        """Code → prompts that are dead among the dataset's `first` (None: all), most first.

        A prompt that failed more than once counts under its last code. Raises `DamagedError`.
        """
        dead = dataset.id_rows[:first][dataset.outcome[:first] == Outcome.DEAD]
        if not len(dead):
            return {}
        self._catalog.read_new(self._enter)
        counts = Counter(self._codes.get(one, "unknown") for one in ids_list(dead))
        return dict(counts.most_common())

    def _enter(self, number: int, segment: Segment) -> None:
        names = segment.attributes["codes"]
        codes = segment.column("code").tolist()
        for prompt, code in zip(ids_list(segment.ids("id")), codes, strict=True):
            self._codes[prompt] = names[code]
