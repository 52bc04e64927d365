"""Committing finished work: facts, then states, then responses, then dead letters.

Knows the store, the spool and Redis, not Celery: who collects the results and acknowledges them is
in `batching.py`; what is done about an error of a commit, in `endurance.py`. A crash between any two
steps is harmless: what is committed is known when the message comes again, and states whose response
is not committed yet belong to nobody until it is.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from redis import Redis, RedisError

from storage.errors import EyasError
from storage.json_records import parse_json
from storage.run import CaptureSpec
from storage.sample import Failure, Response, Stage, States
from storage.spool import Spool
from storage.store import Store
from workers.broker.keys import FACTS, WINDOW, window_field
from workers.broker.messages import Captured, Failed, Responded, Result
from workers.sink.endurance import TRIES, Endurance, Host
from workers.sink.refusals import (
    dead_letter,
    facts_id_of,
    response_failure,
    states_failure,
    states_of,
    why_unusable,
)
from workers.sink.wasted import NOTHING, Waste, Wasted

logger = logging.getLogger(__name__)

LOST_WAITS_S = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""After so many batches in a row whose states were all lost; the last one for ever."""


@dataclass(slots=True)
class Tally:
    """What became of a batch."""

    responses: int = 0
    states: int = 0
    failures: int = 0
    duplicates: int = 0
    """Results that were stored already."""
    wasted: Wasted = NOTHING
    """Calls that were made for these."""
    lost: int = 0
    """States that were gone from the spool: nothing stored."""
    unfit: int = 0
    """States of values that no forward pass gives: nothing stored, captured again."""
    refused: int = 0
    """Results made dead letters here."""
    state_bytes: int = 0
    tokens: int = 0
    """Rows of states stored; tokens of responses where the run keeps no states."""


class Sink:
    """Commits batches to one store. One thread uses it."""

    def __init__(self, *, store: Store, spool: Spool, redis: Redis, host: Host) -> None:
        self._store, self._spool, self._redis, self._host = store, spool, redis, host
        self._endurance = Endurance(store, host)
        self._facts_known: set[str] = set()
        self._waste = Waste(store)
        self._unfit: Counter[bytes] = Counter()
        """How often states of a prompt were unfit: it is not known who made them. Not of a response:
        inline it is generated anew each time, and would be for ever."""
        self._lost_batches = 0
        """In a row, with not one state stored: the spool is at fault, no sample is."""

    @property
    def run_id(self) -> str:
        """Whose results it commits."""
        return self._store.run.id

    def commit(self, results: Sequence[Result], capture: CaptureSpec | None, retry: int = 0) -> Tally:
        """Commit all of it; returns when nothing of it is needed any more but its spool files.

        Waits for as long as the disk is full or the store or Redis away. An item that cannot be
        stored never holds up the others: it becomes a dead letter, which `retry` tells apart from
        one before the last request to try such ones again. Raises `StoppedError`, and
        `RunReplacedError` when the folder holds another run now: nothing of it is lost then.
        """
        tally = Tally()
        failures: list[Failure] = []
        usable: list[Responded | Captured] = []
        for result in results:
            if isinstance(result, Failed):
                continue
            wrong = why_unusable(result, capture)
            if wrong is None:
                usable.append(result)
            else:
                failures.append(dead_letter(result, "sink.refused", wrong, attempts=1))
                tally.refused += 1
        tally.wasted = self._waste.of([*usable, *(r for r in results if isinstance(r, Failed))])
        for facts_id in {facts_id_of(r) for r in usable} - self._facts_known - {""}:
            self._write_facts(facts_id)

        lost = self._commit_states([s for r in usable if (s := states_of(r))], tally, failures)
        responses = [
            r.response
            for r in usable
            if isinstance(r, Responded) and (r.states is None or r.states.spool.name not in lost)
        ]
        self._commit_responses(responses, tally, failures)
        self._settle_lost([r for r in usable if (s := states_of(r)) and s.spool.name in lost], tally)
        failures = [replace(failure, retry=retry) for failure in failures]
        failures += [r.failure for r in results if isinstance(r, Failed)]
        new = self._endurance.in_parts(
            failures, self._store.commit_failures, lambda failure, _error: _log_dropped(failure)
        )
        tally.failures += sum(new)
        tally.duplicates += len(failures) - sum(new)
        return tally

    def free(self, results: Sequence[Result]) -> None:
        """Delete the spool files of results that are committed and acknowledged.

        After the acknowledgement: a message that comes again must find its file, or its states
        in the store. Files that a crash leaves here are swept later.
        """
        for result in results:
            states = states_of(result)
            if states is not None:
                try:
                    self._spool.delete(states.spool)
                except (OSError, EyasError) as error:
                    logger.warning("spool.undeleted name=%s error=%r", states.spool.name, str(error))

    def _commit_states(self, batch: Sequence[States], tally: Tally, failures: list[Failure]) -> set[str]:
        """Names of the spool files that were gone or unfit; the rest is stored or among `failures`."""
        lost: set[str] = set()

        def commit(part: Sequence[States]) -> int:
            done = self._store.commit_states(part, self._spool)
            tally.states += len(done.stored)
            tally.tokens += sum(s.spool.shape[0] for s in done.stored)
            tally.state_bytes += sum(s.spool.size_bytes for s in done.stored)
            tally.duplicates += len(done.duplicate)
            tally.lost += len(done.lost)
            lost.update(s.spool.name for s in done.lost)
            for states, code in done.unfit:
                self._unfit[states.id] += 1
                tries = self._unfit[states.id]
                logger.warning("states.unfit id=%s code=%s tries=%d", states.id.hex(), code, tries)
                if tries < TRIES:
                    lost.add(states.spool.name)
                    tally.unfit += 1
                    continue
                del self._unfit[states.id]
                failures.append(states_failure(states, code, "found as they were stored", attempts=tries))
                tally.refused += 1
            return len(done.stored)

        def refuse(states: States, error: Exception) -> None:
            failures.append(states_failure(states, "sink.refused", repr(error), attempts=TRIES))
            tally.refused += 1

        self._endurance.in_parts(batch, commit, refuse)
        return lost

    def _commit_responses(self, batch: Sequence[Response], tally: Tally, failures: list[Failure]) -> None:
        def commit(part: Sequence[Response]) -> int:
            visible = self._store.commit_responses(part)
            tally.responses += visible
            tally.duplicates += len(part) - visible
            return visible

        def refuse(response: Response, error: Exception) -> None:
            failures.append(response_failure(response, "sink.refused", repr(error), attempts=TRIES))
            tally.refused += 1

        self._endurance.in_parts(batch, commit, refuse)

    def _settle_lost(self, results: Sequence[Responded | Captured], tally: Tally) -> None:
        """Let the feeder publish these again: losing a file is never the sample's fault.

        While every one is lost, something empties the spool or it is another one than the
        server's; the captures then come ever more slowly, and the sink says why.
        """
        if tally.states:
            self._lost_batches = 0
        if not results:
            return
        fields = []
        for result in results:
            states = states_of(result)
            assert states is not None
            logger.warning("states.again name=%s", states.spool.name)
            stage = Stage.GENERATE if isinstance(result, Responded) else Stage.CAPTURE
            fields.append(window_field(states.id, stage))
        if tally.lost and not tally.states:
            wait_s = LOST_WAITS_S[min(self._lost_batches, len(LOST_WAITS_S) - 1)]
            self._lost_batches += 1
            if wait_s:
                self._host.pause(
                    wait_s,
                    f"the spool `{self._spool.folder}` lost all `{len(results)}` states of a batch: "
                    "something empties it, or lanes and sink of this node have different EYAS_SPOOL_DIR",
                )
                self._host.resume()
        try:
            self._redis.hdel(WINDOW, *fields)
        except (RedisError, OSError) as error:
            # The feeder finds them itself, once the queues are empty.
            logger.warning("window.unreached error=%r", str(error))

    def _write_facts(self, facts_id: str) -> None:
        def write(_: Sequence[Failure]) -> int:
            found = self._redis.hget(FACTS, facts_id)
            if found is None:
                return 0
            self._store.write_facts(facts_id, _facts(found))
            return 1

        if self._endurance.patiently(write, (), 0):
            self._facts_known.add(facts_id)
        else:
            # Redis lost its data since. The samples are good; lanes tell it again within a second,
            # and the next batch that names them is another chance.
            logger.warning("facts.unknown id=%s", facts_id)


def _facts(data: bytes | str) -> Mapping[str, object]:
    try:
        content = parse_json(data)
    except ValueError:
        content = None
    return content if isinstance(content, dict) else {"unreadable": True}


def _log_dropped(failure: Failure) -> None:
    """Even its dead letter cannot be stored: the log is its last resting place."""
    logger.error("sink.dropped id=%s code=%s", failure.id.hex(), failure.code)
