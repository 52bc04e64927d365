"""Flower's settings in a checkout: `celery -A workers flower --conf=ops/flower/flowerconfig.py`.

They live in the package, so that `producer up` finds them in a wheel too. Change what this deployment
needs below the import: a wider `address` only together with FLOWER_BASIC_AUTH=NAME:PASSWORD.
"""

from producer.machine.flowerconfig import (  # noqa: F401
    address,
    format_task,
    inspect_timeout,
    max_tasks,
    natural_time,
    purge_offline_workers,
    tasks_columns,
)
