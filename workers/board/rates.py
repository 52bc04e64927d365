"""Speed and time left, from the store's totals as they grow. Pure: the clock is the caller's."""

from collections import deque
from dataclasses import dataclass

from workers.board.board import Rates

OVER_S = 60.0
"""Speed is over the last so many seconds."""
LEFT_OVER_S = 900.0
"""Time left is told from a longer while: states are committed in bursts."""
EARLIEST_S = 5.0
"""Nothing is known of speed before."""
FEWEST_SAMPLES = 8
"""Nothing is known of time left before so many samples were finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the store holds of the run."""

    generated_tokens: int
    """Response tokens of all responses."""
    stored_tokens: int
    """Prompt and response tokens of finished samples."""
    samples: int
    """Finished samples, dead letters included."""


class RateMeter:
    """Totals over time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Totals]] = deque()

    def add(self, now: float, totals: Totals) -> None:
        """Note the totals; what is older than any rate needs is forgotten."""
        if self._seen and (totals.samples < self._seen[-1][1].samples):
            self._seen.clear()  # the caps were changed: other totals
        self._seen.append((now, totals))
        while now - self._seen[0][0] > LEFT_OVER_S:
            self._seen.popleft()

    def rates(self) -> Rates | None:
        """Speed over the last `OVER_S`, or since the first note; None when that is too short."""
        if not self._seen:
            return None
        now, last = self._seen[-1]
        at, first = next((at, totals) for at, totals in self._seen if now - at <= OVER_S)
        if now - at < EARLIEST_S:
            return None
        over = now - at
        return Rates(
            over_s=over,
            generated_tokens_per_s=(last.generated_tokens - first.generated_tokens) / over,
            stored_tokens_per_s=(last.stored_tokens - first.stored_tokens) / over,
            samples_per_s=(last.samples - first.samples) / over,
        )

    def left_s(self, tokens_left: float) -> float | None:
        """Seconds for so many more tokens of finished samples; None before that can be known."""
        if tokens_left <= 0:
            return 0.0
        if not self._seen:
            return None
        (then, first), (now, last) = self._seen[0], self._seen[-1]
        tokens = last.stored_tokens - first.stored_tokens
        if last.samples - first.samples < FEWEST_SAMPLES or tokens <= 0 or now <= then:
            return None
        return tokens_left * (now - then) / tokens
