"""A board made from the store alone, for when Redis or the feeder is not there to give one.

What only living processes know (lanes, servers, sinks, speed) is empty in it.
"""

import time
from pathlib import Path

import numpy as np

from storage.check_log import CheckLog
from storage.index import Index
from storage.run import StatesMode
from storage.settings import DatasetSettings, RunSettings, read_settings
from storage.store import Store
from storage.wanted import read_enough, wanted
from workers.board.board import Board, DatasetBoard


def store_board(output_dir: Path) -> Board:
    """What the store in this folder shows of its run.

    Raises `UnavailableError` (`run.missing`) when there is none.
    """
    store = Store.open(output_dir)
    try:
        settings = read_settings(output_dir)
    except FileNotFoundError:
        settings = None
    spec = store.run.spec
    states = settings.states if settings else spec.states
    capture = settings.capture if settings else spec.capture
    index = Index(store, capture.name if capture else None, settings.retries if settings else ())
    index.refresh()
    checks = CheckLog().follow(index.states)
    datasets = tuple(_dataset(store, index, name, settings, states) for name in index.datasets)
    return Board(
        run_id=store.run.id,
        model=spec.model,
        output_dir=str(output_dir),
        at=time.time(),
        started=time.time(),
        holder="",
        states=states.value,
        finished=bool(datasets) and all(dataset.finished for dataset in datasets),
        datasets=datasets,
        lanes=(),
        servers=(),
        sinks=(),
        rates=None,
        left_s=None,
        window=0,
        unacked=0,
        sink_waiting=0,
        wasted=0,
        republished=0,
        spool_bytes=0,
        disk_free_bytes=None,
        checks=checks,
    )


def _dataset(
    store: Store, index: Index, name: str, settings: RunSettings | None, states: StatesMode
) -> DatasetBoard:
    of = index.dataset(name)
    named = settings.datasets.get(name) if settings else None
    # a dataset the settings do not name is not wanted: nothing of it is missing
    caps = named or DatasetSettings(max_samples=0 if settings else None)
    counts = wanted(of, caps, states)
    first = slice(caps.max_samples)
    reading = not read_enough(of, caps, counts, complete=store.reading_state(name).complete)
    return DatasetBoard(
        name=name,
        wanted=counts.total,
        reading=reading,
        generated=int(np.count_nonzero(of.sample_tokens[first])),
        stored=counts.done,
        failed=counts.failed,
        truncated=of.truncated,
        tokens=counts.tokens,
        prompt_tokens=int(of.prompt_tokens[first].sum()),
        queued=0,
        max_samples=caps.max_samples,
        max_tokens=caps.max_tokens,
        closed=counts.closed,
        finished=counts.finished and not reading,
    )
