"""Hidden states on their way to the spool: those of the plugin and those of a stock server."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from client_lane import CAPTURE, GENERATE, Lane, play, view
from client_stage import (
    Handler,
    answer,
    refuse,
    reply_to,
    rows,
)

from storage.errors import FullError
from storage.run import StatesMode
from storage.sample import Stage as At
from storage.spool import Spool
from workers.broker.messages import Captured, Failed, Responded
from workers.sglang.outcomes import ServerAwayError


def test_a_known_sequence_is_captured_with_a_row_for_every_token(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Captured)
        states = result.states
        assert (states.digest, states.capture, states.hs_indices, states.norm) == (
            b"d" * 16,
            "final",
            (8,),
            "post",
        )
        assert states.spool.shape == (20, 1, 128)
        assert lane.files() == [states.spool.name]
        assert lane.spool.check_values(states.spool).ok
        (body,) = lane.stage.bodies
        assert body["sampling_params"]["max_new_tokens"] == 1
        assert body["return_hidden_states"] is True

    play(tmp_path, scene)


def test_inline_states_come_with_the_response_less_the_last_row(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        result = await lane.execute(GENERATE)
        assert isinstance(result, Responded)
        assert result.states is not None
        assert result.states.digest == result.response.digest
        assert result.states.spool.shape == (10 + 5 - 1, 1, 128)
        assert "extra_key" in lane.stage.bodies[0]

    play(tmp_path, scene, seen=view(StatesMode.INLINE))


def spooling(spool: Spool, **changed: Any) -> Handler:
    """A server with the plugin, on this machine."""

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked = body["sampling_params"]["custom_params"]["eyas"]
        prompt, new = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        states = changed.get("states", np.full((prompt + new - 1, 1, 128), 0x3F80, np.uint16))
        ref = spool.write(asked["name"], states)
        said = {
            "node": ref.node,
            "name": ref.name,
            "shape": ref.shape,
            "crc32": ref.crc32,
            "hs_indices": asked["hs_indices"],
            "norm": "post",
            "kv_dtype": "bfloat16",
        } | changed.get("said", {})
        content = reply_to(body | {"return_hidden_states": False}, eyas_states=said)
        if changed.get("lose"):
            spool.delete(ref)
        return web.json_response(content)

    return handle


def test_states_in_the_spool_are_taken_as_they_lie(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        lane.stage.generate = spooling(lane.spool)
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Captured)
        data = np.full((20, 1, 128), 0x3F80, np.uint16).tobytes()
        assert result.states.spool.crc32 == zlib.crc32(data)
        assert result.states.spool.node == "here"
        assert lane.files() == [result.states.spool.name]

    play(tmp_path, scene, plugin=True)


ZEROS = np.full((20, 1, 128), 0x3F80, np.uint16)
ZEROS[4] = 0
NAN = np.full((20, 1, 128), 0x3F80, np.uint16)
NAN[4, 0, 7] = 0x7FC0
SHORT = np.full((19, 1, 128), 0x3F80, np.uint16)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"states": ZEROS}, "states.zero"),
        ({"states": NAN}, "states.not_finite"),
        ({"states": SHORT}, "states.short"),
        ({"said": {"crc32": 1}}, "states.lost"),
        ({"said": {"hs_indices": [7]}}, "states.layers"),
        ({"said": {"norm": "pre"}}, "states.layers"),
        ({"said": {"shape": [20, 2, 64]}}, "states.shape"),
        ({"said": {"name": "another"}}, "states.missing"),
        ({"said": {"error": "plugin.failed", "message": "why"}}, "states.missing"),
        ({"said": {"shape": "nonsense"}}, "reply.garbage"),
    ],
)
def test_spooled_states_that_are_not_what_was_asked_are_a_dead_letter_and_no_file(
    tmp_path: Path, changed: dict[str, Any], code: str
) -> None:
    async def scene(lane: Lane) -> None:
        lane.stage.generate = spooling(lane.spool, **changed)
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Failed)
        assert (result.failure.code, result.failure.attempts) == (code, 3)
        assert (result.failure.stage, result.failure.digest) == (At.CAPTURE, b"d" * 16)
        assert lane.files() == []

    play(tmp_path, scene, plugin=True)


def test_states_that_are_not_where_the_server_says_are_no_fault_of_the_sample(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        lane.stage.generate = spooling(lane.spool, lose=True)
        with pytest.raises(ServerAwayError) as caught:
            await lane.execute(CAPTURE)
        assert caught.value.code == "server.other_spool"

    play(tmp_path, scene, plugin=True)


def test_states_that_no_empty_spool_has_room_for_are_a_dead_letter_that_says_what_to_raise(
    tmp_path: Path,
) -> None:
    async def scene(lane: Lane) -> None:
        lane.spool.max_bytes = 20 * 128 * 2
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Failed)
        assert (result.failure.code, result.failure.stage) == ("states.too_big", At.CAPTURE)
        assert "EYAS_SPOOL_MAX_GB" in result.failure.message
        assert lane.stage.bodies == [], "the server was not asked"

    play(tmp_path, scene)


def test_a_full_spool_on_either_side_is_no_fault_of_the_sample(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        with pytest.raises(FullError):
            await lane.execute(CAPTURE)

    async def full_of_others(lane: Lane) -> None:
        (lane.spool.folder / "other").write_bytes(bytes(10_000))
        await scene(lane)
        (lane.spool.folder / "other").unlink()

    play(tmp_path, full_of_others, max_bytes=10_000)
    full = answer(eyas_states={"error": "spool.full", "message": "64 GB"})
    play(tmp_path, scene, generate=full, plugin=True)
    play(tmp_path, scene, generate=refuse(507, {"error": "no room"}), plugin=True)
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (lambda prompt, new: rows(prompt - 3, new), "states.short"),
        (lambda prompt, new: [[[0.0] * 128] * prompt], "states.zero"),
        (lambda prompt, new: [[[float("nan")] * 128] * prompt], "states.not_finite"),
        (lambda prompt, new: rows(prompt, new, width=64), "states.shape"),
        (lambda prompt, new: [], "states.short"),
    ],
)
def test_bad_states_of_a_stock_server_end_as_a_dead_letter_and_no_file(
    tmp_path: Path, states: Any, code: str
) -> None:
    async def scene(lane: Lane) -> None:
        lane.stage.generate = answer(states=states)
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Failed)
        assert (result.failure.code, result.failure.attempts, result.failure.capture) == (code, 3, "final")
        assert lane.files() == []
        assert len({body["extra_key"] for body in lane.stage.bodies}) == 3

    play(tmp_path, scene)
