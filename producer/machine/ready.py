"""Whether a service is ready: one short look at the thing itself, never at its log.

Each look takes a second at most and says yes or no; how often to look is the supervisor's business.
"""

import http.client
from urllib.parse import urlsplit

from producer.machine.up_state import Service

LOOK_S = 1.0


def is_ready(service: Service, pid: int, redis_url: str) -> bool:
    """Whether the service, run by process `pid`, takes work now."""
    match service.check:
        case "redis":
            return answers_ping(service.target)
        case "http":
            return answers_get(service.target)
        case "celery":
            return has_reported(redis_url, service.target, pid)


def answers_ping(redis_url: str) -> bool:
    """Whether this Redis takes commands from us; False while it still loads its file."""
    from workers.board.presence import answers

    return answers(redis_url)


def answers_get(url: str) -> bool:
    """Whether a GET of this address gives 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LOOK_S)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def has_reported(redis_url: str, lane: str, pid: int) -> bool:
    """Whether this very process of the lane has put its snapshot into Redis, as it does once it consumes."""
    from workers.board.presence import living

    return any(process.pid == pid and process.lane == lane for process in living(redis_url))
