"""A request the server does not take, in the three shapes of body that SGLang answers with.

Which shape depends on how deep in the real server the request was refused, so a client has to
understand all of them.
"""

from http import HTTPStatus
from typing import Any


class Refusal(Exception):  # noqa: N818 - not an error of ours but an answer
    """An HTTP status and a JSON body."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(str(body))
        self.status = status
        self.body = body


def by_schema(message: str) -> Refusal:
    """The body does not have the fields it should."""
    body = {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    return Refusal(400, body)


def by_contract(message: str) -> Refusal:
    """A sampling parameter that is not known or of another type."""
    return Refusal(400, {"error": message})


def by_value(message: str, status: int = 400) -> Refusal:
    """A value that cannot be used."""
    return Refusal(status, {"error": {"message": message}})


def by_state(message: str, status: int = 503) -> Refusal:
    """The server cannot take it now."""
    body = {
        "object": "error",
        "message": message,
        "type": str(HTTPStatus(status).value),
        "param": None,
        "code": status,
    }
    return Refusal(status, body)
