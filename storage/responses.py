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


def read_response(segment: Segment, row: int) -> Response:
    """The response in this row of the segment."""
    one = {
        name: segment.array(name).read(row, row + 1)[0]
        for name in ("id", "digest", "dataset", "prompt_length", "finish", "counts", "timings", "facts")
    }
    begin, end = segment.array("offset").read(row, row + 2)
    span_begin, span_end = segment.array("span_offset").read(row, row + 2)
    text_begin, text_end = segment.array("text_offset").read(row, row + 2)
    cached, retractions, attempt = one["counts"].tolist()
    e2e_s, queue_s, first_token_s = one["timings"].tolist()
    return Response(
        id=one["id"].tobytes(),
        digest=one["digest"].tobytes(),
        dataset=segment.attributes["datasets"][int(one["dataset"])],
        tokens=segment.array("tokens").read(begin, end),
        prompt_length=int(one["prompt_length"]),
        spans=spans_of(segment.array("spans").read(span_begin, span_end)),
        text=segment.array("text").read(text_begin, text_end).tobytes().decode(),
        finish=FINISHES[int(one["finish"])],
        cached_tokens=cached,
        retractions=retractions,
        attempt=attempt,
        timings=Timings(e2e_s=e2e_s, queue_s=queue_s, first_token_s=first_token_s),
        facts_id=segment.attributes["facts"][int(one["facts"])],
    )
