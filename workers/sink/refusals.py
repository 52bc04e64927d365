"""Why a result cannot be stored, and the dead letter that is stored in its place.

Looks at the result alone; what the store or the spool says of it comes later, in `commit.py`.
"""

from storage.files import NAME
from storage.run import CaptureSpec
from storage.sample import Failure, Response, Stage, States
from storage.tokens import response_digest
from workers.broker.messages import Captured, Failed, Responded, Result

SAID_CHARACTERS = 500
"""Longest message of a dead letter."""


def why_unusable(result: Responded | Captured, capture: CaptureSpec | None) -> str | None:
    """What of the result does not fit itself or the run; None when all of it does."""
    states = states_of(result)
    facts_id = facts_id_of(result)
    if facts_id and not NAME.fullmatch(facts_id):
        return "facts id that cannot be a file's name"
    if isinstance(result, Responded):
        response = result.response
        if response_digest(response.tokens) != response.digest:
            return "digest of other tokens"
        if not 0 <= response.prompt_length <= len(response.tokens):
            return f"prompt of `{response.prompt_length}` tokens in a sequence of `{len(response.tokens)}`"
        if states is not None and (states.id, states.digest) != (response.id, response.digest):
            return "states of another response"
        if states is not None and states.spool.shape[0] > len(response.tokens):
            return f"`{states.spool.shape[0]}` rows of states for `{len(response.tokens)}` tokens"
    if states is not None:
        if not NAME.fullmatch(states.capture):
            return "capture that cannot be a folder's name"
        if states.spool.shape[1] != len(states.hs_indices):
            return f"`{states.spool.shape[1]}` layers of states, `{len(states.hs_indices)}` named"
        if (
            capture is not None
            and states.capture == capture.name
            and (states.hs_indices, states.spool.shape[2]) != (capture.hs_indices, capture.hidden_size)
        ):
            return f"states of layers `{states.hs_indices}` × `{states.spool.shape[2]}` for `{capture.name}`"
    return None


def states_of(result: Result) -> States | None:
    """The states a result brings."""
    return result.states if isinstance(result, Responded | Captured) else None


def facts_id_of(result: Result) -> str:
    """Which server facts a result names; empty for none."""
    match result:
        case Responded():
            return result.response.facts_id
        case Captured():
            return result.states.facts_id
        case Failed():
            return ""


def dead_letter(result: Responded | Captured, code: str, said: str, attempts: int) -> Failure:
    """The dead letter of a result: of its states, or of its response and all that came with it."""
    if isinstance(result, Captured):
        return states_failure(result.states, code, said, attempts)
    return response_failure(result.response, code, said, attempts)


def states_failure(states: States, code: str, said: str, attempts: int) -> Failure:
    """The dead letter of states: their response stays."""
    return Failure(
        id=states.id,
        digest=states.digest,
        capture=states.capture,
        dataset=states.dataset,
        stage=Stage.CAPTURE,
        attempts=attempts,
        code=code,
        message=_printable(said),
    )


def response_failure(response: Response, code: str, said: str, attempts: int) -> Failure:
    """The dead letter of a response."""
    return Failure(
        id=response.id,
        digest=None,
        capture=None,
        dataset=response.dataset,
        stage=Stage.GENERATE,
        attempts=attempts,
        code=code,
        message=_printable(said),
    )


def _printable(said: str) -> str:
    """Short, and without what UTF-8 cannot say."""
    return said[:SAID_CHARACTERS].encode("utf-8", "replace").decode()
