"""Dead letters as a segment's arrays, and back. Committing them is `store.py`'s.

`id`, `digest` uint8 [N, 16] (zeros where no response is meant) · `dataset`, `capture`, `code`
uint16 [N], places in the attributes of those names · `stage` uint8 [N] · `attempts`, `retry`
int32 [N] · `message_offset` int64 [N + 1] into `message` uint8 (UTF-8).
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from storage.columns import ids_array, ids_list, numbered, texts_array
from storage.retries import Retry
from storage.sample import Failure, Stage
from storage.segment import Segment, Staging
from storage.tokens import ID_BYTES

STAGES = tuple(Stage)
"""A stage is its place here: only ever appended to."""
RETRY = "retry"
"""Segments of before there were retries lack this column, which is 0 then."""


def stage_failures(staging: Staging, batch: Sequence[Failure]) -> None:
    """Write dead letters into a staging folder, complete and durable."""
    datasets, dataset = numbered([failure.dataset for failure in batch])
    captures, capture = numbered([failure.capture or "" for failure in batch])
    codes, code = numbered([failure.code for failure in batch])
    message_offset, message = texts_array([failure.message for failure in batch])
    staging.plain("id", ids_array([failure.id for failure in batch]))
    staging.plain("digest", ids_array([failure.digest or bytes(ID_BYTES) for failure in batch]))
    staging.plain("dataset", dataset)
    staging.plain("capture", capture)
    staging.plain("code", code)
    staging.plain("stage", np.array([STAGES.index(failure.stage) for failure in batch], np.uint8))
    staging.plain("attempts", np.array([failure.attempts for failure in batch], np.int32))
    staging.plain(RETRY, np.array([failure.retry for failure in batch], np.int32))
    staging.plain("message_offset", message_offset)
    staging.sliced("message", message)
    staging.finish(
        {
            "samples": len(batch),
            "datasets": datasets,
            "captures": captures,
            "codes": codes,
            "stages": [stage.value for stage in STAGES],
        }
    )


def retry_numbers(segment: Segment) -> NDArray[np.int32]:
    """The `retry` of each of the segment's dead letters, int32 [N]."""
    if not (segment.path / RETRY / "zarr.json").exists():
        return np.zeros(segment.samples, np.int32)
    numbers: NDArray[np.int32] = segment.column(RETRY)
    return numbers


def rows_asked_again(segment: Segment, retries: Sequence[Retry]) -> NDArray[np.bool_]:
    """`retries.asked_again` for all of the segment's dead letters, bool [N]."""
    found = np.zeros(segment.samples, bool)
    for retry in retries:
        fits = retry_numbers(segment) < retry.number
        for column, wanted in (("code", retry.codes), ("dataset", retry.datasets)):
            if wanted:
                names = segment.attributes[f"{column}s"]
                fits &= np.isin(segment.column(column), [at for at, n in enumerate(names) if n in wanted])
        if retry.ids:
            ids = {bytes.fromhex(one) for one in retry.ids}
            fits &= np.array([row.tobytes() in ids for row in segment.ids("id")], bool)
        found |= fits
    return found


def failure_key(failure: Failure) -> tuple[object, ...]:
    """What failed: tries of the same are one dead letter."""
    return (failure.id, failure.digest, failure.capture, failure.stage)


def last_tries(failures: Iterable[Failure]) -> dict[tuple[object, ...], Failure]:
    """What failed → its last try, the first of those after the same request."""
    last: dict[tuple[object, ...], Failure] = {}
    for failure in failures:
        key = failure_key(failure)
        if key not in last or last[key].retry < failure.retry:
            last[key] = failure
    return last


def read_failures(segment: Segment) -> Iterator[Failure]:
    """All of the segment's dead letters."""
    names = segment.attributes
    ids, digests = ids_list(segment.column("id")), ids_list(segment.column("digest"))
    columns = [segment.column(name).tolist() for name in ("dataset", "capture", "code", "stage", "attempts")]
    retries = retry_numbers(segment).tolist()
    offset, text = segment.column("message_offset"), segment.column("message").tobytes()
    for row, (dataset, capture, code, stage, attempts) in enumerate(zip(*columns, strict=True)):
        yield Failure(
            id=ids[row],
            digest=digests[row] if digests[row] != bytes(ID_BYTES) else None,
            capture=names["captures"][capture] or None,
            dataset=names["datasets"][dataset],
            stage=STAGES[stage],
            attempts=attempts,
            code=names["codes"][code],
            message=text[offset[row] : offset[row + 1]].decode(),
            retry=retries[row],
        )
