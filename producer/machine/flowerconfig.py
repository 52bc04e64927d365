"""Flower's settings for Eyas: columns a person can read, bounded memory, loopback only.

A configuration file of Flower's, not a module of ours: `celery -A workers flower
--conf=producer/machine/flowerconfig.py`. `producer up` passes it with a port. Flags of the command line win.
"""

from typing import Any

address = "127.0.0.1"
"""Whoever reaches Flower can stop the workers. `producer up` gives it a login; elsewhere set
FLOWER_BASIC_AUTH=NAME:PASSWORD, and bind nothing wider without one."""
max_tasks = 20_000
"""Tasks kept; Flower's own 100 000 take some 0.7 GB with our rate of events."""
purge_offline_workers = 600
"""Seconds after which a worker that is gone leaves the page."""
inspect_timeout = 5_000.0
"""Milliseconds; a worker with 150 calls in flight does not always answer within the default second."""
natural_time = False
tasks_columns = "name,args,state,result,runtime,received,worker,uuid"


def format_task(task: Any) -> Any:
    """The task with its words freed of quotes: `B2 · 812 tok`, `1480 tok · 61 tok/s · stop`."""
    for field in ("args", "result"):
        said = getattr(task, field, None)
        if isinstance(said, str) and len(said) > 1 and said[0] == said[-1] and said[0] in "'\"":
            setattr(task, field, said[1:-1])
    return task
