"""Every setting of Celery and of its Redis transport, and the times that belong together.

The shortest `visibility_timeout` of all programs on one database wins, so all of them (workers,
`enqueue`, Flower) take their settings from here.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kombu import Exchange, Queue

from storage.errors import UsageError
from workers.broker.queues import all_queues
from workers.config import load_grace_s

TIMING_VARIABLE = "EYAS_INTERNAL_TIMING"
"""JSON of `Timing` fields. For tests only: all processes on one database must agree."""
DRAIN_SHARE = 0.7
"""Of the grace, what calls get to end by themselves; the rest is for giving messages back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times in seconds that only make sense together."""

    visibility_s: float = 40
    """A message whose lease is older is given to another process: work of a killed process
    resumes within this and a sweep. Four renewals fit in, so a pause of 30 s harms nothing."""
    renew_s: float = 10
    """How often a process renews the leases of the messages it holds."""
    sweep_s: float = 5
    """How often each process looks for messages whose lease is old."""
    pulse_s: float = 1
    """How often a lane process reads the run's view, renews its slots and says how it is."""
    slots_s: float = 30
    """How long a grant of slots outlives its process. Shorter than `visibility_s`: by then its
    calls have ended, because its server saw the connection close."""
    drain_s: float = 7
    """How long calls may go on after SIGTERM before they are cancelled."""
    exit_s: float = 3
    """How long giving messages back may take after that, before the process ends anyway."""
    settle_s: float = 60
    """Age at which what crashes left in spool and staging goes once the run is finished."""


def load_timing(environ: Mapping[str, str] = os.environ) -> Timing:
    """The times, with those that the user or a test overrides.

    Raises `UsageError` for a grace that is none, and anything that is not a JSON object of `Timing` fields.
    """
    text = environ.get(TIMING_VARIABLE)
    if not text:
        grace_s = load_grace_s(environ)
        return Timing(drain_s=DRAIN_SHARE * grace_s, exit_s=(1 - DRAIN_SHARE) * grace_s)
    try:
        return Timing(**{name: float(value) for name, value in json.loads(text).items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"`{TIMING_VARIABLE}` cannot be read: {error}", code="settings.value") from None


def settings(redis_url: str, timing: Timing) -> dict[str, Any]:
    """The whole configuration of the app."""
    return {
        "broker_url": redis_url,
        "broker_connection_retry_on_startup": True,
        # The default of 100 attempts would end the worker after some minutes without Redis.
        "broker_connection_max_retries": None,
        "broker_pool_limit": 32,
        "broker_transport_options": transport_options(timing),
        "result_backend": None,
        "task_ignore_result": True,
        # Never pickle: whoever reaches Redis would run code here.
        "task_serializer": "msgpack",
        "accept_content": ["msgpack", "json"],
        "task_queues": [Queue(name, Exchange("eyas"), routing_key=name) for name in all_queues()],
        "task_create_missing_queues": False,
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_publish_retry_policy": {
            "max_retries": None,
            "interval_start": 0.2,
            "interval_step": 0.5,
            "interval_max": 5,
        },
        "task_track_started": True,
        "task_send_sent_event": False,
        "worker_send_task_events": True,
        "worker_pool": "threads",
        "worker_consumer": "workers.broker.consuming:Consumer",
        # Slots decide what is consumed (`consuming.py`); this only leaves room for duplicates
        # that wait. Never 0, which means unlimited. A sink sets its own in `step.py`.
        "worker_prefetch_multiplier": 2,
        # After a reconnect this would hold back as many messages as calls are in flight: they
        # are counted by the slots already.
        "worker_enable_prefetch_count_reduction": False,
        # Calls go on while Redis is away; their results are published when it is back.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_log_format": "%(asctime)s %(levelname)s %(message)s",
        "worker_task_log_format": "%(asctime)s %(levelname)s %(message)s",
        "worker_hijack_root_logger": True,
        "worker_redirect_stdouts": False,
    }


def transport_options(timing: Timing) -> dict[str, Any]:
    """What kombu's Redis transport is told."""
    return {
        "visibility_timeout": timing.visibility_s,
        # A process killed in the middle of a sweep blocks all redelivery for this long.
        "unacked_mutex_expire": max(1, min(30, int(timing.visibility_s))),
        "unacked_restore_interval": timing.sweep_s,
        "unacked_restore_throttle": 1,
        # A new connection is tried once: whoever needs it tries again in a way that SIGTERM can
        # end (`publish.py`, Celery's consumer). kombu's own 100 attempts cannot be.
        "max_retries": 0,
        "max_connections": 500,
        "socket_timeout": 30,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": 10,
        # One list a queue; the default of four makes every BRPOP name four.
        "priority_steps": [0],
        "queue_order_strategy": "round_robin",
    }
