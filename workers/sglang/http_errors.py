"""What an HTTP answer other than 200 means: its code in the table of `outcomes.py`, its message.

A broken connection has no answer; it is told apart in `client.py`.
"""

from collections.abc import Mapping

from storage.errors import FullError
from storage.json_records import parse_json
from workers.sglang.outcomes import CallError
from workers.sglang.reply import printable


def refusal(url: str, status: int, body: bytes) -> CallError | FullError:
    """The error in an answer other than 200."""
    said = error_message(body)
    message = f"{url}: `{status}` {said}"
    match status:
        case 401 | 403:
            code = "server.key"
        case 404 | 405:
            code = "server.not_found"
        case _ if 300 <= status < 400:  # a login page, a moved address: nothing is wrong with the sample
            code = "server.not_found"
        case 408 | 429 | 503:
            code = "server.busy"
        case 410:  # of the plugin, for a file of its spool
            code = "states.lost"
        case 502 | 504:
            code = "server.gateway"
        case 500 if "call_upstream" in said:  # SGLang's router, for a worker that died
            code = "server.gateway"
        case 507:
            return FullError(f"{url}: the server's spool is full: {said}", code="spool.full")
        case _ if status >= 500:
            code = "server.error"
        case 400 if "Duplicate request ID" in said:
            code = "server.duplicate_rid"
        case _:
            code = "server.refused"
    return CallError(message, code=code)


def error_message(body: bytes) -> str:
    """What an error's body says, in any of the server's three shapes; at most 300 characters.

    `{"error": "…"}`, `{"error": {"message": "…"}}`, `{"object": "error", "message": "…"}`; text
    that is not JSON is taken as it is.
    """
    try:
        content = parse_json(body)
    except ValueError:
        content = body.decode(errors="replace")
    if isinstance(content, Mapping):
        content = content.get("error") or content.get("message") or content
    if isinstance(content, Mapping):
        content = content.get("message") or content
    return printable(" ".join(str(content).split())[:300])
