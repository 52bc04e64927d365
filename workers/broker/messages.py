"""What travels through Redis: five frozen types and their bytes.

Metadata and token ids only, never a tensor. A message is a msgpack map with its type and version;
token ids are int32 little-endian, zlib-compressed. Decoding bounds every size, so a hostile
message costs an error and no memory.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import msgpack

from storage.errors import EyasError
from storage.sample import Failure, Finish, Kind, Response, Span, SpoolRef, Stage, States, Timings
from storage.tokens import ID_BYTES, Tokens, token_bytes, tokens_from_bytes

VERSION = 1
"""Raised when a field changes its meaning; a worker leaves other versions to others."""
MAX_TOKENS = 4_194_304
"""Longest token list a message may carry: 16 MiB of ids."""


class MessageError(EyasError):
    """Bytes that are no message of this version: set aside, never run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """An order to a lane: generate a response."""

    run: str
    id: bytes
    dataset: str
    lane: str
    prompt: Tokens
    """int32 [T]."""
    spans: tuple[Span, ...]
    """Of the prompt; the response repeats them."""
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """An order to the lane `capture`: take the states of a known sequence."""

    run: str
    id: bytes
    digest: bytes
    dataset: str
    tokens: Tokens
    """Prompt and response, int32 [T]."""
    prompt_length: int
    capture: str
    """Name of the capture, the folder under `states/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Responded:
    """A result: a response, and with inline states where these lie."""

    run: str
    response: Response
    states: States | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A result: states in the spool of their node."""

    run: str
    states: States


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A result: a dead letter."""

    run: str
    failure: Failure


Message = Generate | Capture | Responded | Captured | Failed
Result = Responded | Captured | Failed


def encode(message: Message) -> bytes:
    """The message's bytes."""
    body: dict[str, Any]
    match message:
        case Generate():
            body = {
                "id": message.id,
                "dataset": message.dataset,
                "lane": message.lane,
                "prompt": _pack_tokens(message.prompt),
                "spans": _pack_spans(message.spans),
                "max_new_tokens": message.max_new_tokens,
            }
        case Capture():
            body = {
                "id": message.id,
                "digest": message.digest,
                "dataset": message.dataset,
                "tokens": _pack_tokens(message.tokens),
                "prompt_length": message.prompt_length,
                "capture": message.capture,
            }
        case Responded():
            body = {
                "response": _pack_response(message.response),
                "states": _pack_states(message.states) if message.states else None,
            }
        case Captured():
            body = {"states": _pack_states(message.states)}
        case Failed():
            failure = message.failure
            body = {name: getattr(failure, name) for name in Failure.__slots__} | {
                "stage": failure.stage.value
            }
    header = {"v": VERSION, "type": type(message).__name__, "run": message.run}
    packed: bytes = msgpack.packb(header | body, use_bin_type=True)
    return packed


def decode(data: bytes) -> Message:
    """The message in these bytes.

    Raises `MessageError` for anything else, whatever it is.
    """
    try:
        body = msgpack.unpackb(data, raw=False, max_map_len=64, max_array_len=1_000_000)
        if body["v"] != VERSION:
            raise MessageError(
                f"message of version `{body['v']}`, this worker speaks `{VERSION}`", code="message.version"
            )
        return _decode(body)
    except MessageError:
        raise
    except Exception as error:  # the edge where foreign bytes enter: anything may be in them
        raise MessageError(f"not a message: {error!r}", code="message.garbage") from None


def _decode(body: dict[str, Any]) -> Message:
    run = _text(body["run"])
    match body["type"]:
        case "Generate":
            return Generate(
                run=run,
                id=_id(body["id"]),
                dataset=_text(body["dataset"]),
                lane=_text(body["lane"]),
                prompt=_unpack_tokens(body["prompt"]),
                spans=_unpack_spans(body["spans"]),
                max_new_tokens=int(body["max_new_tokens"]),
            )
        case "Capture":
            return Capture(
                run=run,
                id=_id(body["id"]),
                digest=_id(body["digest"]),
                dataset=_text(body["dataset"]),
                tokens=_unpack_tokens(body["tokens"]),
                prompt_length=int(body["prompt_length"]),
                capture=_text(body["capture"]),
            )
        case "Responded":
            states = body["states"]
            return Responded(
                run=run,
                response=_unpack_response(body["response"]),
                states=_unpack_states(states) if states else None,
            )
        case "Captured":
            return Captured(run=run, states=_unpack_states(body["states"]))
        case "Failed":
            fields = {name: body[name] for name in Failure.__slots__}
            digest = fields["digest"]
            fields |= {
                "id": _id(fields["id"]),
                "digest": None if digest is None else _id(digest),
                "stage": Stage(fields["stage"]),
            }
            return Failed(run=run, failure=Failure(**fields))
        case other:
            raise MessageError(f"message of unknown type `{other}`", code="message.type")


def _pack_tokens(tokens: Tokens) -> bytes:
    return zlib.compress(token_bytes(tokens), 1)


def _unpack_tokens(data: bytes) -> Tokens:
    inflater = zlib.decompressobj()
    raw = inflater.decompress(data, MAX_TOKENS * 4)
    if inflater.unconsumed_tail or not inflater.eof:
        raise MessageError(f"token list longer than `{MAX_TOKENS}` or cut short", code="message.size")
    return tokens_from_bytes(raw)


def _pack_spans(spans: tuple[Span, ...]) -> list[tuple[int, int, int, str, bool]]:
    return [(s.start, s.end, s.turn, s.kind.value, s.reasoning) for s in spans]


def _unpack_spans(rows: list[Any]) -> tuple[Span, ...]:
    return tuple(
        Span(start=int(start), end=int(end), turn=int(turn), kind=Kind(kind), reasoning=bool(reasoning))
        for start, end, turn, kind, reasoning in rows
    )


def _pack_response(response: Response) -> dict[str, Any]:
    body = {name: getattr(response, name) for name in Response.__slots__}
    timings = response.timings
    return body | {
        "tokens": _pack_tokens(response.tokens),
        "spans": _pack_spans(response.spans),
        "finish": response.finish.value,
        "timings": (timings.e2e_s, timings.queue_s, timings.first_token_s),
    }


def _unpack_response(body: dict[str, Any]) -> Response:
    e2e_s, queue_s, first_token_s = body["timings"]
    return Response(
        **body
        | {
            "id": _id(body["id"]),
            "digest": _id(body["digest"]),
            "tokens": _unpack_tokens(body["tokens"]),
            "spans": _unpack_spans(body["spans"]),
            "finish": Finish(body["finish"]),
            "timings": Timings(
                e2e_s=float(e2e_s), queue_s=float(queue_s), first_token_s=float(first_token_s)
            ),
        }
    )


def _pack_states(states: States) -> dict[str, Any]:
    spool = states.spool
    body = {name: getattr(states, name) for name in States.__slots__}
    return body | {"spool": (spool.node, spool.name, spool.shape, spool.crc32)}


def _unpack_states(body: dict[str, Any]) -> States:
    node, name, (t, layers, hidden), crc32 = body["spool"]
    shape = (int(t), int(layers), int(hidden))
    if min(shape) < 1:
        raise MessageError(f"states of shape `{shape}`", code="message.shape")
    return States(
        **body
        | {
            "id": _id(body["id"]),
            "digest": _id(body["digest"]),
            "spool": SpoolRef(node=_text(node), name=_text(name), shape=shape, crc32=int(crc32)),
            "hs_indices": tuple(int(i) for i in body["hs_indices"]),
        }
    )


def _id(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) != ID_BYTES:
        raise MessageError("an id of other than 16 bytes", code="message.id")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise MessageError(f"text expected, `{type(value).__name__}` found", code="message.type")
    return value
