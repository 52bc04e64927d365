"""Flower's options as Eyas wants them; its configuration file, `FLOWER_*` and flags win over them."""

from collections.abc import Mapping
from typing import Any


def format_task(task: Any) -> Any:
    """The task with its words freed of quotes: `B2 · 812 tok`, `1480 tok · 61 tok/s · stop`."""
    for field in ("args", "result"):
        said = getattr(task, field, None)
        if isinstance(said, str) and len(said) > 1 and said[0] == said[-1] and said[0] in "'\"":
            setattr(task, field, said[1:-1])
    return task


DEFAULTS: Mapping[str, Any] = {
    # Flower has no login unless it is given one: nothing wider without `basic_auth`.
    "address": "127.0.0.1",
    # Flower's own 100 000 take some 0.7 GB with our rate of events.
    "max_tasks": 20_000,
    # A worker that is gone leaves the page after ten minutes.
    "purge_offline_workers": 600,
    # Milliseconds; a worker with 150 calls in flight does not always answer within the default second.
    "inspect_timeout": 5_000.0,
    "natural_time": False,
    "tasks_columns": "name,args,state,result,runtime,received,worker,uuid",
    "format_task": format_task,
}
"""Option → value, with the reason where it is not plain."""
