"""One order from message to result, against a real HTTP server that answers well."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from client_lane import CAPTURE, GENERATE, Lane, play, view
from client_stage import (
    reply_to,
)

from storage.run import CaptureSpec
from storage.sample import Finish, Kind, Span
from storage.tokens import response_digest
from workers.broker.messages import Capture, Failed, Generate, Responded
from workers.sglang.execute import execute
from workers.sglang.outcomes import StaleOrderError


def test_a_prompt_becomes_a_response_of_the_ids_sent_and_the_ids_returned(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        result = await lane.execute(GENERATE)
        assert isinstance(result, Responded)
        response = result.response
        assert response.tokens.tolist() == [*range(20, 30), 5, 6, 7, 8, 9]
        assert response.digest == response_digest(response.tokens)
        assert (response.prompt_length, response.finish, response.attempt) == (10, Finish.LENGTH, 1)
        assert response.spans[1:] == (Span(start=10, end=15, turn=1, kind=Kind.GENERATED),)
        assert response.facts_id == lane.context.facts_of(lane.stage.url).facts_id
        assert response.timings.e2e_s > 0
        assert result.states is None
        (body,) = lane.stage.bodies
        assert body["input_ids"] == list(range(20, 30))
        assert "extra_key" not in body, "prompts share their prefixes"
        assert body["return_hidden_states"] is False
        sampling = body["sampling_params"]
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.7, 0.9, 40)
        assert sampling["max_new_tokens"] == 5

    play(tmp_path, scene)


def test_output_is_capped_so_that_the_whole_can_be_captured(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        result = await lane.execute(GENERATE)
        assert isinstance(result, Responded)
        assert len(result.response.tokens) < 14

    play(tmp_path, scene, seen=view(max_input_tokens=14))


@pytest.mark.parametrize("bad", [-1, 2000, 2_000_000])
def test_an_id_outside_the_vocabulary_is_never_sent(tmp_path: Path, bad: int) -> None:
    tokens = np.array([5, bad], np.int32)

    async def scene(lane: Lane) -> None:
        for order in (
            Generate(**{n: getattr(GENERATE, n) for n in Generate.__slots__} | {"prompt": tokens}),
            Capture(**{n: getattr(CAPTURE, n) for n in Capture.__slots__} | {"tokens": tokens}),
        ):
            result = await execute(order, lane.stage.url, lane.context)
            assert isinstance(result, Failed)
            assert result.failure.code == "prompt.tokens"
        assert lane.stage.bodies == []

    play(tmp_path, scene)


def test_a_sequence_longer_than_the_server_takes_is_never_sent(tmp_path: Path) -> None:
    long = np.full(2042, 5, np.int32)

    async def scene(lane: Lane) -> None:
        capture = Capture(**{n: getattr(CAPTURE, n) for n in Capture.__slots__} | {"tokens": long})
        generate = Generate(**{n: getattr(GENERATE, n) for n in Generate.__slots__} | {"prompt": long[1:]})
        for order in (capture, generate):
            result = await lane.execute(order)
            assert isinstance(result, Failed)
            assert result.failure.code == "prompt.long"
        assert lane.stage.bodies == []

    play(tmp_path, scene)


def test_an_order_for_a_capture_the_run_no_longer_wants_is_stale(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        with pytest.raises(StaleOrderError):
            await lane.execute(CAPTURE)

    other = CaptureSpec(name="aux", hs_indices=(2, 4, 5), norm="none", hidden_size=128)
    play(tmp_path, scene, seen=view(capture=other))
    play(tmp_path, scene, seen=view(capture=None))


def test_the_same_prompt_asks_with_the_same_seed_and_another_with_another(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        other = Generate(**{n: getattr(GENERATE, n) for n in Generate.__slots__} | {"id": b"j" * 16})
        for order in (GENERATE, GENERATE, other):
            await lane.execute(order)
        first, again, another = (body["sampling_params"]["sampling_seed"] for body in lane.stage.bodies)
        assert first == again != another
        assert all(0 <= seed < 2**31 for seed in (first, another))

    play(tmp_path, scene)


def test_a_hundred_and_fifty_calls_are_in_flight_at_once(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        everybody = asyncio.Event()

        async def gather(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if len(lane.stage.bodies) >= 150:
                everybody.set()
            await everybody.wait()
            return web.json_response(reply_to(body))

        lane.stage.generate = gather
        async with asyncio.timeout(30):
            results = await asyncio.gather(*(lane.execute(GENERATE) for _ in range(150)))
        assert all(isinstance(result, Responded) for result in results)

    play(tmp_path, scene)
