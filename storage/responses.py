"""Responses as a segment's arrays, and back. Committing them is `store.py`'s.

`id`, `digest` uint8 [N, 16] · `dataset` uint16 [N], a place in the attribute `datasets` ·
`offset` int64 [N + 1] into `tokens` int32 (prompt and response) · `prompt_length` int32 [N] ·
`span_offset` into `spans` int32 [S, 5] · `text_offset` into `text` uint8 (UTF-8) · `finish`
uint8 [N] · `counts` int32 [N, 3]: cached tokens, retractions, attempt · `timings` float64 [N, 3]
in seconds: whole call, queue, first token · `facts` uint16 [N], a place in the attribute `facts`.
"""

from collections.abc import Sequence

import numpy as np

from storage.columns import (
    flat,
    ids_array,
    numbered,
    offsets,
    spans_array,
    spans_of,
    texts_array,
)
from storage.sample import Finish, Response, Timings
from storage.segment import Segment, Staging

FINISHES = tuple(Finish)
"""A finish reason is its place here: only ever appended to."""


def stage_responses(staging: Staging, batch: Sequence[Response]) -> None:
    """Write responses into a staging folder, complete and durable."""
    datasets, dataset = numbered([response.dataset for response in batch])
    facts, facts_place = numbered([response.facts_id for response in batch])
    text_offset, text = texts_array([response.text for response in batch])
    counts = [(response.cached_tokens, response.retractions, response.attempt) for response in batch]
    timings = [
        (response.timings.e2e_s, response.timings.queue_s, response.timings.first_token_s)
        for response in batch
    ]
    staging.plain("id", ids_array([response.id for response in batch]))
    staging.plain("digest", ids_array([response.digest for response in batch]))
    staging.plain("dataset", dataset)
    staging.plain("offset", offsets([len(response.tokens) for response in batch]))
    staging.sliced("tokens", flat([response.tokens for response in batch], np.int32))
    staging.plain("prompt_length", np.array([response.prompt_length for response in batch], np.int32))
    staging.plain("span_offset", offsets([len(response.spans) for response in batch]))
    staging.sliced("spans", spans_array([response.spans for response in batch]))
    staging.plain("text_offset", text_offset)
    staging.sliced("text", text)
    staging.plain("finish", np.array([FINISHES.index(response.finish) for response in batch], np.uint8))
    staging.plain("counts", np.array(counts, np.int32).reshape(-1, 3))
    staging.plain("timings", np.array(timings, np.float64).reshape(-1, 3))
    staging.plain("facts", facts_place)
    staging.finish(
        {
            "samples": len(batch),
            "datasets": datasets,
            "facts": facts,
            "finishes": [finish.value for finish in FINISHES],
        }
    )


class ResponseColumns:
    """A segment's responses for reading: the small columns in memory, tokens and text on demand."""

    def __init__(self, segment: Segment) -> None:
        """Read the columns; raises as `ArrayFile.read` does."""
        self._segment = segment
        self._ids = segment.column("id")
        self._digests = segment.column("digest")
        self._datasets = segment.column("dataset")
        self._offset = segment.column("offset")
        self._prompt_length = segment.column("prompt_length")
        self._span_offset = segment.column("span_offset")
        self._text_offset = segment.column("text_offset")
        self._finish = segment.column("finish")
        self._counts = segment.column("counts")
        self._timings = segment.column("timings")
        self._facts = segment.column("facts")
        self._tokens = segment.array("tokens")
        self._spans = segment.array("spans")
        self._text = segment.array("text")

    def __len__(self) -> int:
        return len(self._ids)

    def response(self, row: int) -> Response:
        """The response in this row."""
        names = self._segment.attributes
        cached, retractions, attempt = self._counts[row].tolist()
        e2e_s, queue_s, first_token_s = self._timings[row].tolist()
        return Response(
            id=self._ids[row].tobytes(),
            digest=self._digests[row].tobytes(),
            dataset=names["datasets"][self._datasets[row]],
            tokens=self._tokens.read(*self._offset[row : row + 2]),
            prompt_length=int(self._prompt_length[row]),
            spans=spans_of(self._spans.read(*self._span_offset[row : row + 2])),
            text=self._text.read(*self._text_offset[row : row + 2]).tobytes().decode(),
            finish=FINISHES[self._finish[row]],
            cached_tokens=cached,
            retractions=retractions,
            attempt=attempt,
            timings=Timings(e2e_s=e2e_s, queue_s=queue_s, first_token_s=first_token_s),
            facts_id=names["facts"][self._facts[row]],
        )
