"""Messages of running orders, carried from a lost connection to the next one.

kombu gives everything a closed connection held back to its queue, and the queue's end that is
served first: each reconnect would have other processes begin what is still running here, 150
ten-minute calls a process. The messages need not go back: their leases are renewed, and they can
be acknowledged on any connection.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from workers.broker.kombu_private import give_unsettled, take_unsettled, unsettled
from workers.lane.flight import Flight

logger = logging.getLogger(__name__)


class Carried:
    """What one lane process holds, over all its connections. Used by Celery's thread alone."""

    def __init__(self, flight: Flight, names: Callable[[Any], tuple[str, str]]) -> None:
        """`names` gives a message's order and publication, as `flight` knows them."""
        self._flight, self._names = flight, names
        self._messages: dict[str, Any] = {}
        self._suspects: set[str] = set()

    def take(self, qos: Any) -> Sequence[str]:
        """Take the messages of a connection that is lost, before it is closed; their tags."""
        self._messages |= take_unsettled(qos)
        return tuple(self._messages)

    def hand_over(self, channel: Any) -> int:
        """Give them to the connection that takes its place; how many there are.

        An acknowledgement that is due while none is there waits in Celery's loop, and finds the
        new one in the message.
        """
        give_unsettled(channel, self._messages)
        count = len(self._messages)
        self._messages.clear()
        return count

    def settle_forgotten(self, qos: Any, settle: Callable[[Any, bool], None]) -> int:
        """Settle what has ended and could not be acknowledged then; how many.

        Celery tries an acknowledgement once. Without this such a message would be held, and its
        lease renewed, for as long as the process lives. Only what is found twice is settled: an
        acknowledgement may be on its way.
        """
        ended = {
            tag: message
            for tag, message in unsettled(qos).items()
            if not message.acknowledged and not self._flight.flies(self._names(message)[0])
        }
        forgotten = [message for tag, message in ended.items() if tag in self._suspects]
        self._suspects = set(ended)
        for message in forgotten:
            logger.info("lane.settled_late id=%s", self._names(message)[0])
            settle(message, self._flight.has_done(self._names(message)[1]))
        return len(forgotten)
