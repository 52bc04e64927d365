"""Dead letters counted by their code, followed as they are committed.

Only those count that still stand: a response beats a failure to generate, states beat a failure
to capture. Which prompts are dead is `index.py`'s answer.
"""

from collections import Counter

from storage.catalog import Catalog
from storage.columns import ids_list
from storage.dataset_index import DatasetIndex, Outcome
from storage.failures import retry_numbers
from storage.segment import Segment
from storage.store import Store


class DeadLetters:
    """The codes of a store's dead letters. Not for two threads at once."""

    def __init__(self, store: Store) -> None:
        self._catalog = Catalog(store.path / "failures")
        self._codes: dict[bytes, tuple[int, str]] = {}
        """Prompt → the last request to try it again that it has answered, and its code then."""

    def by_code(self, dataset: DatasetIndex, first: int | None = None) -> dict[str, int]:
        """Code → prompts that are dead among the dataset's `first` (None: all), most first.

        A prompt that failed more than once counts under its last code. Raises `DamagedError`.
        """
        dead = dataset.id_rows[:first][dataset.outcome[:first] == Outcome.DEAD]
        if not len(dead):
            return {}
        self._catalog.read_new(self._enter)
        counts = Counter(self._codes.get(one, (0, "unknown"))[1] for one in ids_list(dead))
        return dict(counts.most_common())

    def _enter(self, number: int, segment: Segment) -> None:
        names = segment.attributes["codes"]
        codes, retries = segment.column("code").tolist(), retry_numbers(segment).tolist()
        for prompt, code, retry in zip(ids_list(segment.ids("id")), codes, retries, strict=True):
            # A merged segment may hold what came before one that was seen earlier.
            if retry >= self._codes.get(prompt, (0, ""))[0]:
                self._codes[prompt] = (retry, names[code])
