"""Whether a reply is what was asked for; what fails here is never stored. Pure.

What a reply's words mean is in `reply.py`, what follows from an error in `outcomes.py`.
"""

from storage.errors import FullError
from storage.run import CaptureSpec
from storage.spool import ValueCheck
from storage.tokens import Tokens
from workers.sglang.outcomes import CallError
from workers.sglang.reply import RepliedStates, Reply


def check_sendable(tokens: Tokens, *, vocab_size: int, max_input_tokens: int | None) -> None:
    """Raises `CallError` for ids that must not be sent: one outside the vocabulary kills the server."""
    if not len(tokens):
        raise CallError("there are no tokens", code="prompt.tokens")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        bad = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        raise CallError(f"token id `{bad}` is outside the vocabulary of `{vocab_size}`", code="prompt.tokens")
    if max_input_tokens is not None and len(tokens) >= max_input_tokens:
        raise CallError(
            f"`{len(tokens)}` tokens, the server takes fewer than `{max_input_tokens}`",
            code="prompt.long",
        )


def check_reply(reply: Reply, *, rid: str, sent_tokens: int, max_new_tokens: int, vocab_size: int) -> None:
    """Raises `CallError` unless the reply is this request's, whole, and within the vocabulary."""
    if reply.rid != rid:
        raise CallError(f"the reply is to `{reply.rid}`, asked was `{rid}`", code="reply.garbage")
    if reply.finish == "abort":
        if reply.finish_status == 507:
            raise FullError(f"the server's spool is full: {reply.finish_message}", code="spool.full")
        busy = reply.finish_status in (429, 503)
        raise CallError(
            f"aborted after `{len(reply.tokens)}` tokens: {reply.finish_message or 'no reason given'}"[:300],
            code="server.busy" if busy else "reply.aborted",
        )
    if reply.finish not in ("stop", "length"):
        raise CallError(f"unknown finish reason `{reply.finish}`"[:300], code="reply.garbage")
    produced = len(reply.tokens)
    if reply.prompt_tokens != sent_tokens:
        raise CallError(
            f"the server saw `{reply.prompt_tokens}` prompt tokens, sent were `{sent_tokens}`",
            code="reply.counts",
        )
    if not 1 <= produced <= max_new_tokens or produced != reply.completion_tokens:
        raise CallError(
            f"`{produced}` output ids, counted as `{reply.completion_tokens}`, at most `{max_new_tokens}` "
            "were asked for",
            code="reply.counts",
        )
    if int(reply.tokens.max()) >= vocab_size:
        raise CallError(
            f"output id `{int(reply.tokens.max())}` is outside the vocabulary of `{vocab_size}`",
            code="reply.tokens",
        )


def check_weights(reply: Reply, *, expected: str) -> None:
    """Raises `CallError` when other weights than those the server was connected with made any token.

    They can be replaced under a running server, which no connection notices.
    """
    others = reply.weights - {expected}
    if others:
        raise CallError(f"made by weights `{min(others)}`, connected was `{expected}`", code="server.changed")


def check_states(
    states: RepliedStates | None, *, name: str, rows: int, capture: CaptureSpec
) -> RepliedStates:
    """The states, when they are under the name asked for and are of these rows and this capture.

    Raises `CallError` otherwise.
    """
    if states is None:
        raise CallError("the reply has no hidden states", code="states.missing")
    if states.ref.name != name:
        raise CallError(f"the states are in `{states.ref.name}`, asked was `{name}`", code="states.missing")
    if states.hs_indices != capture.hs_indices or states.norm != capture.norm:
        raise CallError(
            f"the states are of layers {list(states.hs_indices)}, norm `{states.norm}`; asked were "
            f"{list(capture.hs_indices)}, norm `{capture.norm}`",
            code="states.layers",
        )
    wanted = (rows, len(capture.hs_indices), capture.hidden_size)
    if states.ref.shape[1:] != wanted[1:]:
        raise CallError(f"the states are {states.ref.shape}, asked were {wanted}", code="states.shape")
    if states.ref.shape[0] != rows:
        raise CallError(f"{states.ref.shape[0]} of {rows} rows of hidden states", code="states.short")
    return states


def check_values(found: ValueCheck) -> None:
    """Raises `CallError` for values that no forward pass gives."""
    if found.non_finite:
        raise CallError(f"`{found.non_finite}` values are not finite", code="states.not_finite")
    if found.zero_rows:
        raise CallError(f"`{found.zero_rows}` of `{found.rows}` rows are zero", code="states.zero")


def why_short(rows: int, prompt_tokens: int, *, cached_tokens: int, chunked_prefill_size: int | None) -> str:
    """How many rows a prefill gave, with the likely cause and what to change."""
    counted = f"{rows} of {prompt_tokens} rows"
    if cached_tokens:
        return (
            f"{counted}: {cached_tokens} came from the prefix cache; "
            "start the server with `--disable-radix-cache`"
        )
    if rows < prompt_tokens and chunked_prefill_size is not None:
        return f"{counted}: the server chunked the prefill; start it with `--chunked-prefill-size -1`"
    return counted
