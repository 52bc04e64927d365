"""What travels through Redis: five frozen types and their bytes.

Metadata and token ids only, never a tensor. A message is a msgpack map with its type and version;
token ids are int32 little-endian, zlib-compressed. Decoding bounds every size and checks every type,
so a hostile message costs an error and no memory, and stops nobody who stores what is in it.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from storage.checks import read_check
from storage.sample import Check, Failure, Finish, Response, Span, SpoolRef, Stage, States, Timings
from storage.tokens import Tokens
from workers.broker.message_fields import MessageError as MessageError
from workers.broker.message_fields import (
    pack_spans,
    pack_tokens,
    read_count,
    read_id,
    read_seconds,
    read_text,
    unpack_spans,
    unpack_tokens,
)

VERSION = 1
"""Raised when a field changes its meaning; a worker leaves other versions to others."""
MAX_BYTES = 128 << 20
"""Longest message: two such lists, a text beside each token, and room."""


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
    retry: int = 0
    """What a dead letter of this order says of itself, see `Failure.retry`."""


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
    retry: int = 0
    """As an order to generate has it."""


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


RESPONSE_COUNTS = ("prompt_length", "cached_tokens", "retractions", "attempt")
"""Those fields of a response that are counts."""

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
                "prompt": pack_tokens(message.prompt),
                "spans": pack_spans(message.spans),
                "max_new_tokens": message.max_new_tokens,
                "retry": message.retry,
            }
        case Capture():
            body = {
                "id": message.id,
                "digest": message.digest,
                "dataset": message.dataset,
                "tokens": pack_tokens(message.tokens),
                "prompt_length": message.prompt_length,
                "capture": message.capture,
                "retry": message.retry,
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
    # Half a UTF-16 pair, which a server's JSON can say and UTF-8 cannot, must not hold a result back.
    packed: bytes = msgpack.packb(header | body, use_bin_type=True, unicode_errors="replace")
    return packed


def decode(data: bytes) -> Message:
    """The message in these bytes.

    Raises `MessageError` for anything else, whatever it is.
    """
    try:
        if len(data) > MAX_BYTES:
            raise MessageError(f"a message of `{len(data)}` bytes", code="message.size")
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
    run = read_text(body["run"])
    match body["type"]:
        case "Generate":
            return Generate(
                run=run,
                id=read_id(body["id"]),
                dataset=read_text(body["dataset"]),
                lane=read_text(body["lane"]),
                prompt=unpack_tokens(body["prompt"]),
                spans=unpack_spans(body["spans"]),
                max_new_tokens=read_count(body["max_new_tokens"]),
                retry=read_count(body.get("retry", 0)),
            )
        case "Capture":
            return Capture(
                run=run,
                id=read_id(body["id"]),
                digest=read_id(body["digest"]),
                dataset=read_text(body["dataset"]),
                tokens=unpack_tokens(body["tokens"]),
                prompt_length=read_count(body["prompt_length"]),
                capture=read_text(body["capture"]),
                retry=read_count(body.get("retry", 0)),
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
            fields = {name: body[name] for name in Failure.__slots__ if name != "retry"}
            digest = fields["digest"]
            fields |= {
                "id": read_id(fields["id"]),
                "digest": None if digest is None else read_id(digest),
                "capture": None if fields["capture"] is None else read_text(fields["capture"]),
                "stage": Stage(fields["stage"]),
                "attempts": read_count(fields["attempts"]),
                "retry": read_count(body.get("retry", 0)),
                **{name: read_text(fields[name]) for name in ("dataset", "code", "message")},
            }
            return Failed(run=run, failure=Failure(**fields))
        case other:
            raise MessageError(f"message of unknown type `{other}`", code="message.type")


def _pack_response(response: Response) -> dict[str, Any]:
    body = {name: getattr(response, name) for name in Response.__slots__}
    timings = response.timings
    return body | {
        "tokens": pack_tokens(response.tokens),
        "spans": pack_spans(response.spans),
        "finish": response.finish.value,
        "timings": (timings.e2e_s, timings.queue_s, timings.first_token_s),
    }


def _unpack_response(body: dict[str, Any]) -> Response:
    e2e_s, queue_s, first_token_s = body["timings"]
    return Response(
        **body
        | {
            "id": read_id(body["id"]),
            "digest": read_id(body["digest"]),
            "tokens": unpack_tokens(body["tokens"]),
            "spans": unpack_spans(body["spans"]),
            "finish": Finish(body["finish"]),
            "timings": Timings(
                e2e_s=read_seconds(e2e_s),
                queue_s=read_seconds(queue_s),
                first_token_s=read_seconds(first_token_s),
            ),
            **{name: read_text(body[name]) for name in ("dataset", "text", "facts_id")},
            **{name: read_count(body[name]) for name in RESPONSE_COUNTS},
        }
    )


def _pack_states(states: States) -> dict[str, Any]:
    spool = states.spool
    body = {name: getattr(states, name) for name in States.__slots__ if name != "check"}
    if states.check is not None:  # left out otherwise: workers from before there were checks read on
        body["check"] = asdict(states.check)
    return body | {"spool": (spool.node, spool.name, spool.shape, spool.crc32)}


def _unpack_check(content: Any) -> Check | None:
    """None also for what cannot be read: states are no worse for want of their check."""
    try:
        return None if content is None else read_check(content)
    except ValueError:
        return None


def _unpack_states(body: dict[str, Any]) -> States:
    node, name, (t, layers, hidden), crc32 = body["spool"]
    shape = (read_count(t), read_count(layers), read_count(hidden))
    # As many bytes as a file may have; the product of three int32 would pass it.
    if min(shape) < 1 or 2 * math.prod(shape) >= 2**62:
        raise MessageError(f"states of shape `{shape}`", code="message.shape")
    return States(
        **body
        | {
            "id": read_id(body["id"]),
            "digest": read_id(body["digest"]),
            "spool": SpoolRef(
                node=read_text(node), name=read_text(name), shape=shape, crc32=read_count(crc32, 2**32)
            ),
            "hs_indices": tuple(read_count(i) for i in body["hs_indices"]),
            **{name: read_text(body[name]) for name in ("dataset", "capture", "facts_id", "norm")},
            "check": _unpack_check(body.get("check")),
        }
    )
