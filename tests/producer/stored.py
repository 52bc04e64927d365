"""A small real store and board to look at: 5 prompts wanted of `B1`, 2 stored, 1 dead, states off."""

import dataclasses
import time
from pathlib import Path

import numpy as np

from storage.run import DatasetSpec, RunSpec, Sampling, StatesMode
from storage.sample import Failure, Finish, Kind, Prompt, Response, Span, Stage
from storage.settings import DatasetSettings, RunSettings, write_settings
from storage.store import Store
from storage.tokens import prompt_id, response_digest
from workers.board.board import Board, DatasetBoard, LaneBoard, Rates, ServerBoard
from workers.board.processes import ServerState

SPEC = RunSpec(
    model="tiny",
    tokenizer_digest="00",
    template_digest="00",
    vocab_size=100,
    sampling=Sampling(),
    short_max_tokens=64,
    long_max_tokens=64,
    states=StatesMode.OFF,
    capture=None,
)


def small_store(folder: Path, responses: int = 2, failures: int = 1, prompts: int = 5) -> Store:
    store = Store.create(folder, SPEC)
    store.begin_dataset(
        DatasetSpec(
            name="B1",
            source="file:b1.jsonl",
            source_digest="00",
            form="text",
            column="prompt",
            lane="short",
            semantics={},
        )
    )
    made = [_prompt(i) for i in range(prompts)]
    store.add_prompts("B1", made, next_row=prompts, complete=True, dropped={})
    store.commit_responses([make_response(p) for p in made[:responses]])
    dead = made[responses : responses + failures]
    store.commit_failures(
        [
            Failure(
                id=p.id,
                digest=None,
                capture=None,
                dataset="B1",
                stage=Stage.GENERATE,
                attempts=3,
                code="server.refused",
                message="no",
            )
            for p in dead
        ]
    )
    write_settings(
        folder,
        RunSettings(
            server_urls=("http://127.0.0.1:1",),
            capture_urls=("http://127.0.0.1:1",),
            concurrency={"short": 4},
            max_input_tokens=1000,
            states=StatesMode.OFF,
            capture=None,
            datasets={"B1": DatasetSettings()},
        ),
    )
    return store


def _prompt(number: int) -> Prompt:
    tokens = np.array([1, 2, number], np.int32)
    return Prompt(
        id=prompt_id("B1", tokens),
        dataset="B1",
        tokens=tokens,
        spans=(Span(start=0, end=3, turn=0, kind=Kind.USER),),
        source_row=number,
    )


def make_response(prompt: Prompt) -> Response:
    tokens = np.concatenate([prompt.tokens, np.array([7, 8, 9, 10], np.int32)])
    return Response(
        id=prompt.id,
        digest=response_digest(tokens),
        dataset="B1",
        tokens=tokens,
        prompt_length=3,
        spans=(*prompt.spans, Span(start=3, end=7, turn=1, kind=Kind.GENERATED)),
        text="…",
        finish=Finish.STOP,
    )


def board(store: Store, **changes: object) -> Board:
    """What a feeder would say of a run that is under way."""
    return dataclasses.replace(
        Board(
            run_id=store.run.id,
            model="tiny",
            output_dir=str(store.path),
            at=time.time(),
            started=time.time() - 60,
            holder="sink@here",
            states="off",
            finished=False,
            datasets=(DATASET,),
            lanes=(
                LaneBoard(name="short", limit_per_server=4, limit=4, in_flight=3, waiting=1200, processes=1),
            ),
            servers=(
                ServerBoard(
                    url="http://127.0.0.1:1",
                    lanes=("short",),
                    state=ServerState.AWAY,
                    since=time.time() - 720,
                    reason="connection refused",
                    in_flight=0,
                ),
            ),
            sinks=(),
            rates=Rates(
                over_s=60, generated_tokens_per_s=3400, stored_tokens_per_s=3000, samples_per_s=61.25
            ),
            left_s=720,
            window=4,
            unacked=3,
            sink_waiting=0,
            wasted=0,
            republished=0,
            spool_bytes=0,
            disk_free_bytes=None,
        ),
        **changes,
    )


DATASET = DatasetBoard(
    name="B1",
    wanted=7000,
    reading=False,
    generated=5012,
    stored=4210,
    failed=3,
    truncated=12,
    tokens=1_234_567,
    prompt_tokens=400_000,
    queued=4,
    max_samples=7000,
    max_tokens=None,
    closed=False,
    finished=False,
)
