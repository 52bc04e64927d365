"""Makes runs, prompts, responses and states for the tests of storage; a seed decides everything."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.codec import Codec
from storage.index import Outcome
from storage.run import CaptureSpec, DatasetSpec, RunSpec, Sampling, StatesMode
from storage.sample import Failure, Finish, Kind, Prompt, Response, Span, Stage, States, Timings
from storage.settings import DatasetSettings, RunSettings, write_settings
from storage.spool import Spool, spool_name
from storage.store import Store
from storage.tokens import as_tokens, prompt_id, response_digest

VOCAB = 1000
LAYERS, HIDDEN = 3, 16
CAPTURE = CaptureSpec(name="eagle3", hs_indices=(2, 5, 8), norm="post", hidden_size=HIDDEN)
SPEC = RunSpec(
    model="org/model",
    tokenizer_digest="aa",
    template_digest="bb",
    vocab_size=VOCAB,
    sampling=Sampling(),
    short_max_tokens=100,
    long_max_tokens=200,
    states=StatesMode.REPLAY,
    capture=CAPTURE,
)


def new_store(path: Path, spec: RunSpec = SPEC, codec: Codec | None = None) -> Store:
    return Store.create(path, spec, codec)


def dataset_spec(name: str = "B1", source: str = "file:b1.jsonl") -> DatasetSpec:
    return DatasetSpec(
        name=name,
        source=source,
        source_digest="cc",
        form="text",
        column="prompt",
        lane="short",
        semantics={"system": None},
    )


def make_prompts(count: int, dataset: str = "B1", seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    prompts = []
    for row in range(count):
        tokens = as_tokens(rng.integers(0, VOCAB, int(rng.integers(8, 30))))
        spans = (
            Span(start=0, end=3, turn=0, kind=Kind.SYSTEM),
            Span(start=3, end=len(tokens), turn=1, kind=Kind.USER),
        )
        key = prompt_id(dataset, tokens)
        prompts.append(Prompt(id=key, dataset=dataset, tokens=tokens, spans=spans, source_row=row))
    return prompts


def make_response(prompt: Prompt, seed: int = 0, finish: Finish = Finish.STOP) -> Response:
    rng = np.random.default_rng([seed, *prompt.id])
    answer = as_tokens(rng.integers(0, VOCAB, int(rng.integers(1, 20))))
    tokens = np.concatenate([prompt.tokens, answer])
    spans = (*prompt.spans, Span(start=len(prompt.tokens), end=len(tokens), turn=2, kind=Kind.GENERATED))
    return Response(
        id=prompt.id,
        digest=response_digest(tokens),
        dataset=prompt.dataset,
        tokens=tokens,
        prompt_length=len(prompt.tokens),
        spans=spans,
        text=f"Antwort → {seed} 🦅",
        finish=finish,
        cached_tokens=3,
        retractions=1,
        attempt=2,
        timings=Timings(e2e_s=1.5, queue_s=0.25, first_token_s=0.5),
        facts_id="f1",
    )


def tensor_of(response: Response, rows: int | None = None) -> NDArray[np.uint16]:
    """bf16 bits that are finite and nowhere zero."""
    rng = np.random.default_rng([7, *response.id])
    rows = len(response.tokens) if rows is None else rows
    return rng.integers(1, 0x7F80, (rows, LAYERS, HIDDEN), dtype=np.uint16)


def make_states(
    response: Response, spool: Spool, tensor: NDArray[np.uint16] | None = None, facts_id: str = "f1"
) -> States:
    tensor = tensor_of(response) if tensor is None else tensor
    return States(
        id=response.id,
        digest=response.digest,
        dataset=response.dataset,
        capture=CAPTURE.name,
        spool=spool.write(spool_name(response.id), tensor),
        facts_id=facts_id,
        hs_indices=CAPTURE.hs_indices,
        norm=CAPTURE.norm,
    )


def make_failure(prompt: Prompt, digest: bytes | None = None) -> Failure:
    return Failure(
        id=prompt.id,
        digest=digest,
        capture=CAPTURE.name if digest else None,
        dataset=prompt.dataset,
        stage=Stage.CAPTURE if digest else Stage.GENERATE,
        attempts=3,
        code="server.refused",
        message="nicht möglich",
    )


def add_all(store: Store, prompts: Sequence[Prompt], dataset: str = "B1") -> None:
    """Begin the dataset and store these prompts as all there are."""
    store.begin_dataset(dataset_spec(dataset))
    store.add_prompts(dataset, prompts, next_row=len(prompts), complete=True, dropped={})


def whole_store(path: Path, samples: int = 20, spec: RunSpec = SPEC) -> tuple[Store, list[Response]]:
    """A store that holds all of a run, in several segments of each kind, and its settings."""
    store, spool = new_store(path, spec), Spool(path.parent / "spool", "node1", 1 << 30)
    prompts = make_prompts(samples)
    add_all(store, prompts)
    responses = [make_response(prompt) for prompt in prompts]
    half = samples // 2
    for part in (responses[:half], responses[half:]):
        assert store.commit_responses(part) == len(part)
        done = store.commit_states([make_states(response, spool) for response in part], spool)
        assert len(done.stored) == len(part)
    store.write_facts("f1", {"version": "0.5.10"})
    settings = RunSettings(
        server_urls=(),
        capture_urls=(),
        concurrency={"short": 1},
        max_input_tokens=1000,
        states=spec.states,
        capture=spec.capture,
        datasets={"B1": DatasetSettings()},
    )
    write_settings(path, settings)
    return store, responses


def assert_same(left: object, right: object) -> None:
    """Equal dataclasses, arrays in them compared by value and dtype."""
    assert type(left) is type(right)
    for name in left.__slots__:  # type: ignore[attr-defined]
        one, other = getattr(left, name), getattr(right, name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other), name
        else:
            assert one == other, name


def with_spec(spec: RunSpec, **changes: object) -> RunSpec:
    return replace(spec, **changes)  # type: ignore[arg-type]


def outcome_of(
    key: bytes,
    responses: Mapping[bytes, Response],
    states: Container[tuple[bytes, bytes]],
    dead: Container[tuple[bytes, bytes | None]],
) -> Outcome:
    """What a store that holds these must say of a prompt: states and dead letters are by id and digest."""
    response = responses.get(key)
    if response is None:
        return Outcome.DEAD if (key, None) in dead else Outcome.NONE
    if (key, response.digest) in states:
        return Outcome.STORED
    return Outcome.DEAD if (key, response.digest) in dead else Outcome.RESPONDED
