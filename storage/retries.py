"""Dead letters that are asked for again: what `producer retry` wrote down, and whom it means.

A request names what it is for and has a number. Every dead letter carries the number of the last
request when it was tried, so a request opens those of before it and never its own outcome: what
fails again is dead again. Nothing here reads or writes files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.sample import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """One request: the dead letters that fit all of what it names. What is empty fits any."""

    number: int
    """From 1, in the order of asking."""
    codes: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    """Prompt ids, in hex."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for an id that is not in hex."""
        for one in self.ids:
            bytes.fromhex(one)

    def fits(self, failure: Failure) -> bool:
        """Whether this dead letter is meant."""
        return (
            failure.retry < self.number
            and (not self.codes or failure.code in self.codes)
            and (not self.datasets or failure.dataset in self.datasets)
            and (not self.ids or failure.id.hex() in self.ids)
        )


def last_number(retries: Sequence[Retry]) -> int:
    """The number of the last request; 0 before any."""
    return max((retry.number for retry in retries), default=0)


def asked_again(failure: Failure, retries: Sequence[Retry]) -> bool:
    """Whether a dead letter is one no more, because somebody has asked for it again."""
    return any(retry.fits(failure) for retry in retries)
