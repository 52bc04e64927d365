"""What the tests of `producer enqueue` share: rows, manifests, and how a refusal is said."""

from collections.abc import Callable
from pathlib import Path

from tests.producer.small import Ended

Enqueue = Callable[..., Ended]
"""`producer enqueue` with Redis, server and folder given."""


def rows(count: int) -> list[object]:
    return [{"prompt": f"What is {n} and {n}?"} for n in range(count)]


def refused(ended: Ended, status: int, said: str, hint: str) -> None:
    """As every error is said: `error: …`, a blank line, `hint: …`."""
    assert ended.status == status, ended.err
    message, _, rest = ended.err.partition("error: ")[2].partition("\n\nhint: ")
    assert said in message
    assert hint in rest
    assert "Traceback" not in ended.err


def manifest(*tables: str) -> Path:
    path = Path("sets.toml")
    path.write_text("".join(f"[[dataset]]\n{table}\n" for table in tables))
    return path
