"""A lane with a fault in its own code: every order ends in a `TypeError`.

The real app; started by `celery -A tests.workers.broker.faulty`.
"""

from typing import Any

from workers.celery import app as app
from workers.sglang import execute


async def _fail(*_: Any, **__: Any) -> None:
    raise TypeError("a fault of our own")


execute.generate_once = _fail  # type: ignore[assignment]
