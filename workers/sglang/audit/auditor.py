"""Checks of one lane process: which samples, the second capture, the figures. Never costs a sample.

The second capture takes the slot of the order whose sample it checks, and is made when that one's
is over, in another batch. One request gives both: the states once more, and the server's
log-probabilities of the last tokens. A sample that cannot be checked is stored all the same.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from storage.checks import bounded
from storage.errors import EyasError
from storage.run import CaptureSpec
from storage.sample import Check, SpoolRef, States
from storage.tokens import Tokens
from workers.sglang.attempt import Context, ask_with_states
from workers.sglang.audit.at_hand import at_hand, discard
from workers.sglang.audit.checkpoint import CheckpointError
from workers.sglang.audit.measuring import Measured, measure
from workers.sglang.audit.output_head import OutputHead, find_head
from workers.sglang.audit.verdict import judged
from workers.sglang.outcomes import CallError
from workers.sglang.reply import Reply
from workers.sglang.requests import capture_body

logger = logging.getLogger(__name__)

POSITIONS = 64
"""Last tokens of a sample whose log-probabilities are asked: a server holds so many times its vocabulary."""
DEADLINE_S = 300.0
"""Of the second capture: its sample is not kept waiting for longer."""
FIRST_TRIES = 3
"""A server whose first samples cannot be checked is not asked twice for every one of them."""


@dataclass(slots=True, kw_only=True)
class _Figures:
    """What has been found out of one sample."""

    measured: Measured | None = None
    server_logprobs: NDArray[np.float64] | None = None
    own_logprobs: NDArray[np.float64] | None = None
    skipped: list[str] = field(default_factory=list)


class Auditor:
    """The checks of one lane process, on its one event loop."""

    def __init__(self) -> None:
        self._computing = asyncio.Semaphore(1)
        """Blocks of one sample and of one head are held at once, however many are checked."""
        self._tries: Counter[tuple[str, ...]] = Counter()
        self._checked: set[tuple[str, ...]] = set()
        self._heads: dict[str, OutputHead | str] = {}

    def chooses(self, digest: bytes, server: tuple[str, ...], every: int) -> bool:
        """Whether the response of this digest is checked: one in `every`, the same ones in any process;
        and the first of each `server`, a name for it and for what it captures. 0 is none.
        """
        if every < 1:
            return False
        if int.from_bytes(digest, "little") % every == 0:
            return True
        if server in self._checked or self._tries[server] >= FIRST_TRIES:
            return False
        self._tries[server] += 1
        self._checked.add(server)
        return True

    async def check(
        self, states: States, tokens: Tokens, prompt_length: int, url: str, context: Context
    ) -> Check | None:
        """What comes of checking states that have just been captured; None when they are not chosen.

        `tokens` are prompt and response, int32 [T]; the response, generated or given, begins at
        `prompt_length`. Nothing is raised but what cancels the caller,
        and no file is left.
        """
        settings, facts = context.view.settings, context.facts.get(url)
        capture = settings.capture
        if capture is None or facts is None:
            return None
        server = (context.view.run.id, url, facts.facts_id, capture.name)
        if not self.chooses(states.digest, server, settings.check_every):
            return None
        figures = _Figures()
        try:
            await self._figure_out(figures, states, tokens, url, capture, context)
        except EyasError as error:
            logger.info("check.skipped id=%s server=%s why=%r", states.id.hex(), url, error.message)
            figures.skipped.append(f"second capture: {error.code}")
        # An edge: a fault in a check must not cost the sample, which is good without it.
        except Exception as error:
            logger.exception("check.failed id=%s", states.id.hex())
            figures.skipped.append(f"the check failed: {error!r}")
        if figures.measured is None:
            self._checked.discard(server)
        try:
            judgement = judged(
                url,
                hs_indices=capture.hs_indices,
                measured=figures.measured,
                server_logprobs=figures.server_logprobs,
                answered=len(tokens) - prompt_length,
                own_logprobs=figures.own_logprobs,
                vocab_size=context.vocab_size(url),
                skipped=figures.skipped,
            )
        # The same edge: figures that nobody has thought of.
        except Exception:
            logger.exception("check.failed id=%s", states.id.hex())
            return None
        check = bounded(judgement)
        for alarm in check.alarms:
            logger.warning(
                "check.alarm code=%s value=%.4g limit=%.4g id=%s server=%s says=%r",
                *(alarm.code, alarm.value, alarm.limit, states.id.hex(), url, alarm.message),
            )
        return check

    async def _figure_out(
        self,
        figures: _Figures,
        states: States,
        tokens: Tokens,
        url: str,
        capture: CaptureSpec,
        context: Context,
    ) -> None:
        """Fill in what can be had; raises `EyasError` where it ends early."""
        count = min(POSITIONS, len(tokens) - 1)
        reply, again = await ask_with_states(
            capture_body(tokens, logprobs=count),
            url,
            context,
            prompt_id=states.id,
            capture=capture,
            deadline_s=DEADLINE_S,
            max_new_tokens=1,
        )
        try:
            figures.server_logprobs = _logprobs(reply, tokens, count, figures)
            async with (
                self._computing,
                at_hand(states.spool, url, context) as first,
                at_hand(again.ref, url, context) as second,
            ):
                await asyncio.to_thread(
                    self._compute, figures, first, second, tokens, capture, context, url, count
                )
        finally:
            await discard(again.ref, url, context)

    def _compute(
        self,
        figures: _Figures,
        first: SpoolRef,
        second: SpoolRef,
        tokens: Tokens,
        capture: CaptureSpec,
        context: Context,
        url: str,
        count: int,
    ) -> None:
        """Runs in a thread."""
        final = len(capture.hs_indices) - 1 if capture.norm == "post" else None
        head = None
        if final is None:
            figures.skipped.append("output head: the capture has no final state behind the norm")
        else:
            # On a server's own machine its model may be a folder, where the run says a hub id.
            names = (context.view.run.spec.model, context.facts_of(url).model)
            head = self._head(names, figures)
        if head is not None and head.hidden_size != first.shape[2]:
            figures.skipped.append(f"output head: it takes {head.hidden_size} values")
            head = None
        # The state of a token gives the next one's log-probability.
        last = len(tokens) - 1
        figures.measured = found = measure(
            context.spool,
            first,
            second,
            final=final,
            norm=None if head is None else head.norm,
            tail=slice(last - count, last),
        )
        if head is not None and figures.server_logprobs is not None and found.tail is not None:
            try:
                figures.own_logprobs = head.logprobs(found.tail, tokens[last + 1 - count :])
            except (OSError, ValueError) as error:
                figures.skipped.append(f"output head: {error}")

    def _head(self, names: Sequence[str], figures: _Figures) -> OutputHead | None:
        """Of the first of these names of the model whose files are here."""
        reasons = []
        for model in dict.fromkeys(names):
            if model not in self._heads:
                try:
                    self._heads[model] = find_head(model)
                except CheckpointError as error:
                    self._heads[model] = f"output head of `{model}`: {error}"
            found = self._heads[model]
            if isinstance(found, OutputHead):
                return found
            reasons.append(found)
        figures.skipped += reasons
        return None


async def checked(states: States, tokens: Tokens, prompt_length: int, url: str, context: Context) -> States:
    """The states just captured, with their check if they are chosen for one.

    Cancelled, it leaves no file of theirs either: nobody will be told of them.
    """
    if context.auditor is None:
        return states
    try:
        check = await context.auditor.check(states, tokens, prompt_length, url, context)
    except BaseException:
        await discard(states.spool, url, context)
        raise
    return states if check is None else replace(states, check=check)


def _logprobs(reply: Reply, tokens: Tokens, count: int, figures: _Figures) -> NDArray[np.float64] | None:
    """The server's log-probabilities of the last tokens, when it says those and no others."""
    said = reply.logprobs
    if said is None or len(said.values) != count:
        figures.skipped.append("log-probabilities: the server does not say them")
        return None
    # SGLang writes 0 for ids it takes for an image's, and the vocabulary's last is among them; the value
    # is the token's own all the same.
    others = (said.tokens != tokens[len(tokens) - count :]) & (said.tokens != 0)
    if others.any():
        raise CallError("log-probabilities of other tokens", code="reply.garbage")
    if not all(map(math.isfinite, said.values)):
        figures.skipped.append("log-probabilities: some are not finite")
        return None
    return said.values
