"""What must hold inside one segment, kind by kind; reads every byte of it. Knows no other segment
but through `Known`, and neither settings nor outcomes: those are `verify.py`'s.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from storage.columns import KINDS, ids_list
from storage.failures import retry_numbers
from storage.idtable import ABSENT, IdTable
from storage.responses import FINISHES
from storage.run import RunSpec, StatesMode
from storage.sample import Finish
from storage.segment import Segment
from storage.spool import check_values
from storage.tokens import prompt_id, response_digest

_BLOCK_BYTES = 16 << 20
"""Raw bytes of states held at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is not as it must be."""

    code: str
    """Stable: `states.crc32`, `response.digest`, …"""
    segment: str
    """Folder under the store: `responses/s-00000001`; empty when it is no segment's."""
    id: str
    """The sample's id in hex; empty when it is the whole segment's."""
    message: str


@dataclass(slots=True, kw_only=True)
class Known:
    """What the checks of responses and states need to know of earlier segments."""

    spec: RunSpec
    prompts: IdTable = field(default_factory=IdTable)
    """Prompt id → its occurrence."""
    repeated: dict[bytes, int] = field(default_factory=dict)
    """`prompt_id` of occurrence 0 → the last occurrence there was, for prompts that repeat."""
    responses: IdTable = field(default_factory=IdTable)
    """Prompt id → tokens of its response."""
    sequences: IdTable = field(default_factory=IdTable)
    """Id ^ digest of a response → its tokens."""


Found = Iterator[tuple[str, bytes, str]]
"""Code, id or nothing, message."""


def check_prompts(segment: Segment, dataset: str, known: Known) -> Found:
    """Lengths, vocabulary, spans; every id computed again; none twice; how far the source was read."""
    for name in ("next_row", "complete", "dropped"):
        segment.attributes[name]
    ids = segment.column("id")
    keys = ids_list(ids)
    offset, tokens = segment.column("offset"), segment.column("tokens")
    yield from _check_lengths(segment, len(ids), ("source_row", "given_from"))
    yield from _check_offset("offset", offset, len(ids), len(tokens))
    yield from _check_spans(segment, keys, offset)
    occurrences = np.zeros(len(ids), np.int64)
    for row, key in enumerate(keys):
        row_tokens = tokens[offset[row] : offset[row + 1]]
        yield from _check_vocabulary(key, row_tokens, known.spec.vocab_size)
        first = prompt_id(dataset, row_tokens)
        if key != first:
            occurrence = known.repeated.get(first, 0) + 1
            if key != prompt_id(dataset, row_tokens, occurrence=occurrence):
                yield "prompt.id", key, "the id is not that of the tokens"
                continue
            known.repeated[first] = occurrences[row] = occurrence
    for key, new in zip(keys, known.prompts.add(ids, occurrences), strict=True):
        if not new:
            yield "prompt.duplicate", key, "the prompt is stored twice"


def check_responses(segment: Segment, known: Known) -> Found:
    """Lengths, vocabulary, spans; digests and ids computed again; a prompt for each; none twice."""
    ids, digests = segment.column("id"), segment.column("digest")
    keys, stored_digests = ids_list(ids), ids_list(digests)
    offset, tokens = segment.column("offset"), segment.column("tokens")
    text_offset, text = segment.column("text_offset"), segment.column("text")
    prompt_length, finish = segment.column("prompt_length"), segment.column("finish")
    datasets = np.array(segment.attributes["datasets"])[segment.column("dataset")].tolist()
    columns = ("dataset", "prompt_length", "finish", "counts", "timings", "facts", "digest")
    yield from _check_lengths(segment, len(ids), columns)
    yield from _check_offset("offset", offset, len(ids), len(tokens))
    yield from _check_offset("text_offset", text_offset, len(ids), len(text))
    yield from _check_spans(segment, keys, offset)
    text.tobytes().decode()  # raises what the caller turns into a problem
    lengths = np.diff(offset)
    occurrences = known.prompts.find(ids)
    for row, key in enumerate(keys):
        row_tokens = tokens[offset[row] : offset[row + 1]]
        yield from _check_vocabulary(key, row_tokens, known.spec.vocab_size)
        if response_digest(row_tokens) != stored_digests[row]:
            yield "response.digest", key, "the digest is not that of the tokens"
        if not 0 <= prompt_length[row] <= len(row_tokens):
            yield "response.prompt_length", key, f"{prompt_length[row]} of {len(row_tokens)} tokens"
        given = FINISHES[finish[row]] is Finish.GIVEN
        prompt = row_tokens if given else row_tokens[: prompt_length[row]]
        if occurrences[row] == ABSENT:
            yield "response.prompt", key, f"no prompt of dataset `{datasets[row]}` has this id"
        elif key != prompt_id(datasets[row], prompt, occurrence=int(occurrences[row])):
            yield "response.id", key, "the response does not begin with its prompt"
    for key, new in zip(keys, known.responses.add(ids, lengths), strict=True):
        if not new:
            yield "response.duplicate", key, "the prompt has two visible responses"
    known.sequences.add(ids ^ digests, lengths)


def check_states(segment: Segment, capture: str, known: Known) -> Found:
    """Rows a token, checksums, finite, no row of zeros; layers as the run's capture says."""
    ids, digests = segment.column("id"), segment.column("digest")
    keys = ids_list(ids)
    offset, states = segment.column("offset"), segment.array("states")
    yield from _check_lengths(segment, len(ids), ("digest", "crc32", "facts"))
    yield from _check_offset("offset", offset, len(ids), len(states))
    yield from _check_capture(segment, states.shape, capture, known.spec)
    tokens = known.sequences.find(ids ^ digests)
    for row, (key, rows) in enumerate(zip(keys, np.diff(offset).tolist(), strict=True)):
        fewest = tokens[row] - (known.spec.states is StatesMode.INLINE)
        # States of a response that was lost before it was stored have nothing to be compared with.
        if tokens[row] != ABSENT and not fewest <= rows <= tokens[row]:
            yield "states.rows", key, f"{rows} rows for {tokens[row]} tokens"
    stored_crc32 = segment.column("crc32").tolist()
    block = max(1, _BLOCK_BYTES // max(1, int(np.prod(states.shape[1:], dtype=np.int64)) * 2))
    for row, key in enumerate(keys):
        crc32, end = 0, int(offset[row + 1])
        for start in range(int(offset[row]), end, block):
            values = states.read(start, min(start + block, end))
            crc32 = zlib.crc32(values.reshape(-1).view(np.uint8).data, crc32)
            found = check_values(values)
            if found.non_finite:
                yield "states.finite", key, f"{found.non_finite} values are not finite"
            if found.zero_rows:
                yield "states.zero", key, f"{found.zero_rows} rows are zero in a layer"
        if crc32 != stored_crc32[row]:
            yield "states.crc32", key, "the bytes do not match the sample's checksum"


def check_failures(segment: Segment, known: Known) -> Found:
    """Lengths, and a prompt for each."""
    ids = segment.column("id")
    columns = ("digest", "dataset", "capture", "code", "stage", "attempts")
    yield from _check_lengths(segment, len(ids), columns)
    if len(retry_numbers(segment)) != len(ids):
        yield "segment.lengths", b"", f"`retry` has {len(retry_numbers(segment))} rows, `id` {len(ids)}"
    message = segment.column("message")
    yield from _check_offset("message_offset", segment.column("message_offset"), len(ids), len(message))
    for key, at in zip(ids_list(ids), known.prompts.find(ids), strict=True):
        if at == ABSENT:
            yield "failure.prompt", key, "no prompt has this id"


def _check_lengths(segment: Segment, samples: int, columns: tuple[str, ...]) -> Found:
    if samples != segment.samples:
        yield "segment.samples", b"", f"`samples` is {segment.samples}, `id` has {samples}"
    for name in columns:
        if len(segment.array(name)) != samples:
            yield "segment.lengths", b"", f"`{name}` has {len(segment.array(name))} rows, `id` {samples}"
        segment.column(name)  # its checksum


def _check_offset(name: str, offset: NDArray[np.int64], samples: int, end: int) -> Found:
    if len(offset) != samples + 1 or offset[0] != 0 or offset[-1] != end or np.any(np.diff(offset) < 0):
        yield "segment.offsets", b"", f"`{name}` does not lead from 0 to {end} in {samples} steps"


def _check_spans(segment: Segment, keys: list[bytes], offset: NDArray[np.int64]) -> Found:
    span_offset, spans = segment.column("span_offset"), segment.column("spans")
    yield from _check_offset("span_offset", span_offset, len(keys), len(spans))
    tokens = np.repeat(np.diff(offset), np.diff(span_offset))
    start, end, kind = spans[:, 0], spans[:, 1], spans[:, 3]
    bad = (start < 0) | (end < start) | (end > tokens) | (kind < 0) | (kind >= len(KINDS))
    for row in np.unique(np.searchsorted(span_offset, np.flatnonzero(bad), side="right") - 1):
        yield "spans.range", keys[row], "a span lies outside the tokens or is of no known kind"


def _check_vocabulary(key: bytes, tokens: NDArray[np.int32], vocab_size: int) -> Found:
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        yield "tokens.vocabulary", key, f"ids outside the vocabulary of {vocab_size}"


def _check_capture(segment: Segment, shape: tuple[int, ...], capture: str, spec: RunSpec) -> Found:
    layers = list(segment.attributes["hs_indices"])
    if len(layers) != shape[1]:
        yield "states.layers", b"", f"{shape[1]} layers, `hs_indices` names {len(layers)}"
    wanted = spec.capture
    if wanted is None or wanted.name != capture:
        return
    found = (layers, segment.attributes["norm"], shape[2])
    expected = (list(wanted.hs_indices), wanted.norm, wanted.hidden_size)
    if found != expected:
        yield "states.capture", b"", f"layers, norm, width are {found}; the run's are {expected}"
