"""Prompts as a segment's arrays, and back. Committing them is `store.py`'s.

`id` uint8 [N, 16] · `offset` int64 [N + 1] into `tokens` int32 · `span_offset` int64 [N + 1] into
`spans` int32 [S, 5] · `source_row` int64 [N] · `given_from` int32 [N], -1 when nothing was given.
Attributes say how far the source was read when the segment was committed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from storage.columns import flat, ids_array, ids_list, offsets, spans_array, spans_of
from storage.sample import Prompt
from storage.segment import Segment, Staging

BLOCK = 512
"""Prompts decoded at once while streaming."""


def stage_prompts(
    staging: Staging, prompts: Sequence[Prompt], *, next_row: int, complete: bool, dropped: Mapping[str, int]
) -> None:
    """Write the prompts of one dataset into a staging folder, complete and durable."""
    staging.plain("id", ids_array([prompt.id for prompt in prompts]))
    staging.plain("offset", offsets([len(prompt.tokens) for prompt in prompts]))
    staging.sliced("tokens", flat([prompt.tokens for prompt in prompts], np.int32))
    staging.plain("span_offset", offsets([len(prompt.spans) for prompt in prompts]))
    staging.sliced("spans", spans_array([prompt.spans for prompt in prompts]))
    staging.plain("source_row", np.array([prompt.source_row for prompt in prompts], np.int64))
    given = [-1 if prompt.given_from is None else prompt.given_from for prompt in prompts]
    staging.plain("given_from", np.array(given, np.int32))
    attributes: dict[str, Any] = {
        "samples": len(prompts),
        "next_row": next_row,
        "complete": complete,
        "dropped": dict(dropped),
    }
    staging.finish(attributes)


def read_prompts(segment: Segment, dataset: str, start: int, stop: int) -> Iterator[Prompt]:
    """The segment's prompts `[start, stop)`, decoded block by block."""
    offset, span_offset = segment.column("offset"), segment.column("span_offset")
    ids = ids_list(segment.array("id").read(start, stop))
    rows = segment.array("source_row").read(start, stop)
    given = segment.array("given_from").read(start, stop)
    tokens, spans = segment.array("tokens"), segment.array("spans")
    for first in range(start, stop, BLOCK):
        last = min(stop, first + BLOCK)
        block = tokens.read(offset[first], offset[last])
        block_spans = spans.read(span_offset[first], span_offset[last])
        for at in range(first, last):
            begin, end = offset[at : at + 2] - offset[first]
            span_begin, span_end = span_offset[at : at + 2] - span_offset[first]
            given_from = int(given[at - start])
            yield Prompt(
                id=ids[at - start],
                dataset=dataset,
                tokens=block[begin:end],
                spans=spans_of(block_spans[span_begin:span_end]),
                source_row=int(rows[at - start]),
                given_from=None if given_from < 0 else given_from,
            )
