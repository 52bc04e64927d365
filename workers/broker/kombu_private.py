"""All that is read and changed of kombu's private state, which has no interface for it.

kombu is pinned, and the tests of `tests/workers/broker` would notice a change. Why any of it is
needed is said where it is used: `lease.py`, `carrying.py`, `consuming.py` and the sink's `step.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kombu.transport import redis as transport
from kombu.transport.virtual import Empty
from redis import RedisError


def unsettled(qos: Any) -> dict[str, Any]:
    """Delivery tag → message, of what is neither acknowledged nor given back; from any thread."""
    while True:
        try:
            settled = set(qos._dirty)
            return {tag: message for tag, message in qos._delivered.items() if tag not in settled}
        except RuntimeError:
            # Changed by Celery's thread while it was copied.
            continue


def take_unsettled(qos: Any) -> dict[str, Any]:
    """The same, and the connection forgets them: closed, it gives nothing back to the queue."""
    qos._flush()
    taken = dict(qos._delivered)
    qos._delivered.clear()
    return taken


def give_unsettled(channel: Any, messages: Mapping[str, Any]) -> None:
    """Make another connection the one on which these messages are settled."""
    for tag, message in messages.items():
        message.channel = channel
        channel.qos._delivered[tag] = message


def tell_time(now: Callable[[], float]) -> None:
    """Let leases in Redis begin, and be found old, by this clock instead of the machine's."""
    transport.time = now


def consume_while(channel: Any, has_room: Callable[[], bool]) -> None:
    """Let the connection ask for messages only while there is room, as its prefetch limit does.

    A request to Redis that is under way may still bring one, and is read in any case: kombu would
    leave it in the socket, in no queue, where nobody else could take it.
    """
    within_prefetch = channel.qos.can_consume
    channel.qos.can_consume = lambda: bool(channel._in_poll) or (has_room() and within_prefetch())


def survive_garbage(channel: Any, set_aside: Callable[[bytes, str], None]) -> None:
    """Set aside what in a queue is no JSON: kombu loses it, with a traceback each time."""
    read = channel.handlers["BRPOP"]
    # Not kombu's own list of connection errors, which has `KeyError` in it.
    errors = (RedisError, OSError, Empty)

    def read_or_set_aside(**options: Any) -> Any:
        client, seen = channel.client, []
        parse = client.parse_response

        def parse_and_keep(*args: Any, **kwargs: Any) -> Any:
            seen.append(parse(*args, **kwargs))
            return seen[-1]

        client.parse_response = parse_and_keep
        try:
            return read(**options)
        except errors:
            raise
        # The edge where foreign bytes enter: anything may be in them.
        except Exception as error:
            body = seen[0][1] if seen and seen[0] else b""
            set_aside(body, f"no message: {error!r}")
            return True
        finally:
            del client.parse_response

    channel.handlers["BRPOP"] = read_or_set_aside
