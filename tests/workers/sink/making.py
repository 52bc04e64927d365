"""A run, its prompts and the results of made-up workers, for the tests of sink and feeder."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.run import CaptureSpec, DatasetSpec, RunSpec, Sampling, StatesMode
from storage.sample import Failure, Finish, Kind, Prompt, Response, Span, Stage, States
from storage.settings import DatasetSettings, RunSettings, write_settings
from storage.spool import Spool, spool_name
from storage.store import Store
from storage.tokens import as_tokens, prompt_id, response_digest
from workers.broker.messages import Capture, Captured, Failed, Generate, Responded

CAPTURE = CaptureSpec(name="eagle3", hs_indices=(1, 2), norm="none", hidden_size=8)


def make_spec(states: StatesMode = StatesMode.REPLAY, capture: CaptureSpec | None = CAPTURE) -> RunSpec:
    return RunSpec(
        model="tiny",
        tokenizer_digest="t",
        template_digest="c",
        vocab_size=1000,
        sampling=Sampling(),
        short_max_tokens=64,
        long_max_tokens=128,
        states=states,
        capture=None if states is StatesMode.OFF else capture,
    )


def make_settings(states: StatesMode = StatesMode.REPLAY, **datasets: DatasetSettings) -> RunSettings:
    return RunSettings(
        server_urls=("http://127.0.0.1:1",),
        capture_urls=(),
        concurrency={"short": 4, "long": 2, "capture": 4},
        max_input_tokens=8192,
        states=states,
        capture=None if states is StatesMode.OFF else CAPTURE,
        datasets=datasets,
    )


def make_prompts(dataset: str, count: int, *, first: int = 0, tokens: int = 5) -> list[Prompt]:
    prompts = []
    for at in range(first, first + count):
        ids = as_tokens([at % 1000, at // 1000, *range(tokens - 2)])
        span = Span(start=0, end=len(ids), turn=0, kind=Kind.USER)
        prompts.append(
            Prompt(id=prompt_id(dataset, ids), dataset=dataset, tokens=ids, spans=(span,), source_row=at)
        )
    return prompts


def make_store(
    path: Path,
    counts: dict[str, int],
    *,
    states: StatesMode = StatesMode.REPLAY,
    lane: str = "short",
    settings: RunSettings | None = None,
    complete: bool = True,
) -> Store:
    """A store with so many prompts of each dataset, and its settings."""
    store = Store.create(path, make_spec(states))
    for name, count in counts.items():
        add_dataset(store, name, make_prompts(name, count), lane=lane, complete=complete)
    write_settings(path, settings or make_settings(states, **{name: DatasetSettings() for name in counts}))
    return store


def add_dataset(
    store: Store, name: str, prompts: Sequence[Prompt], *, lane: str = "short", complete: bool = True
) -> None:
    spec = DatasetSpec(
        name=name, source="file:x", source_digest="d", form="text", column="prompt", lane=lane, semantics={}
    )
    store.begin_dataset(spec)
    store.add_prompts(name, prompts, next_row=len(prompts), complete=complete, dropped={})


def make_response(prompt: Prompt, *, answer: Sequence[int] = (7, 8, 9), **fields: object) -> Response:
    tokens = np.concatenate([prompt.tokens, as_tokens(answer)])
    given = {
        "id": prompt.id,
        "digest": response_digest(tokens),
        "dataset": prompt.dataset,
        "tokens": tokens,
        "prompt_length": len(prompt.tokens),
        "spans": prompt.spans,
        "text": "so",
        "finish": Finish.STOP,
        "facts_id": "facts1",
    }
    return Response(**given | fields)


def make_values(response: Response, rows: int | None = None) -> NDArray[np.uint16]:
    """The states that a made-up model gives: other ones for every response, the same each time."""
    rows = len(response.tokens) if rows is None else rows
    seed = int.from_bytes(response.digest[:8], "little")
    return np.random.default_rng(seed).integers(0x3F00, 0x4000, (rows, 2, 8), dtype=np.uint16)


def make_states(spool: Spool, response: Response, rows: int | None = None, **fields: object) -> States:
    """States in the spool."""
    given = {
        "id": response.id,
        "digest": response.digest,
        "dataset": response.dataset,
        "capture": CAPTURE.name,
        "spool": spool.write(spool_name(response.id), make_values(response, rows)),
        "facts_id": "facts1",
        "hs_indices": CAPTURE.hs_indices,
        "norm": CAPTURE.norm,
    }
    return States(**given | fields)


def make_failure(prompt: Prompt, code: str = "server.refused") -> Failure:
    return Failure(
        id=prompt.id,
        digest=None,
        capture=None,
        dataset=prompt.dataset,
        stage=Stage.GENERATE,
        attempts=3,
        code=code,
        message="no",
    )


def answer_order(store: Store, spool: Spool, order: Generate | Capture) -> Responded | Captured | Failed:
    """What a lane would publish for an order."""
    if isinstance(order, Capture):
        response = store.response(order.id)
        assert response.digest == order.digest
        assert response.tokens.tolist() == order.tokens.tolist()
        return Captured(run=order.run, states=make_states(spool, response))
    prompt = Prompt(id=order.id, dataset=order.dataset, tokens=order.prompt, spans=order.spans, source_row=0)
    return Responded(run=order.run, response=make_response(prompt))
