"""From a stock server's JSON to a spool file, on replies recorded from a real one."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_stage import recorded, rows

from storage.errors import FullError
from storage.sample import SpoolRef
from storage.spool import Spool
from workers.sglang.decode import DecodeJob, bf16_bits, decode
from workers.sglang.decoding import DecodePool, decoder_environ
from workers.sglang.outcomes import CallError
from workers.sglang.reply import read_reply


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", "here", 1 << 30)


def job(path: Path, content: Any, prompt_tokens: int, **changed: Any) -> DecodeJob:
    """A job on this body, which is bytes or is encoded."""
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    usual = {
        "name": "states",
        "hs_indices": (8,),
        "norm": "post",
        "hidden_size": 128,
        "chunked_prefill_size": None,
    }
    return DecodeJob(body=str(path), prompt_tokens=prompt_tokens, **{**usual, **changed})


def read(spool: Spool, content: dict[str, Any]) -> Any:
    """The spooled states, uint16 [T, L, H]."""
    states = read_reply(content).states
    assert states is not None
    return np.concatenate([block.copy() for block in spool.blocks(states.ref)])


def exact_bits(values: Any) -> Any:
    """The upper halves of float32, having checked that the lower ones are zero: those are bf16."""
    wide = np.asarray(values, np.float32).view(np.uint32)
    assert not (wide & 0xFFFF).any()
    return (wide >> 16).astype(np.uint16)


def test_a_captured_prompt_has_a_row_for_every_token(spool: Spool, tmp_path: Path) -> None:
    body = recorded("final-capture")["body"]
    content = decode(job(tmp_path / "b", body, 10), spool)
    expected = exact_bits(body["meta_info"]["hidden_states"][0]).reshape(10, 1, 128)
    assert (read(spool, content) == expected).all()
    assert "hidden_states" not in content["meta_info"]
    assert read_reply(content).tokens.tolist() == body["output_ids"]


def test_inline_states_have_no_row_for_the_last_token(spool: Spool, tmp_path: Path) -> None:
    body = recorded("final-inline")["body"]
    content = decode(job(tmp_path / "b", body, 6), spool)
    block, *generated = body["meta_info"]["hidden_states"]
    expected = exact_bits([*block, *generated]).reshape(6 + 4 - 1, 1, 128)
    assert (read(spool, content) == expected).all()


def test_auxiliary_layers_lie_side_by_side_in_a_row(spool: Spool, tmp_path: Path) -> None:
    body = recorded("aux-capture")["body"]
    content = decode(job(tmp_path / "b", body, 10, hs_indices=(2, 4, 5), norm="none"), spool)
    states = read(spool, content)
    assert states.shape == (10, 3, 128)
    row = body["meta_info"]["hidden_states"][0][7]
    assert (states[7, 2] == exact_bits(row[256:])).all()
    assert read_reply(content).states.hs_indices == (2, 4, 5)  # type: ignore[union-attr]


def test_a_retracted_request_has_one_row_for_each_token(spool: Spool, tmp_path: Path) -> None:
    body = recorded("retracted-inline-0")["body"]
    entries = body["meta_info"]["hidden_states"]
    blocks = [k for k, entry in enumerate(entries) if isinstance(entry[0], list)]
    assert len(blocks) > 1, "the recorded request was not retracted"
    content = decode(job(tmp_path / "b", body, 16), spool)
    states = read(spool, content)
    assert states.shape[0] == 16 + len(body["output_ids"]) - 1
    again = blocks[1]
    assert (states[16 + again - 1, 0] == exact_bits(entries[again][-1])).all()
    assert (states[16 + again, 0] == exact_bits(entries[again + 1])).all()
    assert (states[:16, 0] == exact_bits(entries[0])).all()


@pytest.mark.parametrize(
    ("name", "tokens", "chunk", "said"),
    [
        (
            "chunked-capture",
            40,
            32,
            "8 of 40 rows: the server chunked the prefill; .*--chunked-prefill-size -1",
        ),
        ("final-cached-again", 20, None, "1 of 20 rows: 19 came from the prefix cache"),
    ],
)
def test_missing_rows_are_refused_with_their_likely_cause(
    spool: Spool, tmp_path: Path, name: str, tokens: int, chunk: int | None, said: str
) -> None:
    body = recorded(name)["body"]
    with pytest.raises(CallError, match=said) as caught:
        decode(job(tmp_path / "b", body, tokens, chunked_prefill_size=chunk), spool)
    assert caught.value.code == "states.short"
    assert list(spool.folder.iterdir()) == []


def stated(states: Any) -> dict[str, Any]:
    body = recorded("final-capture")["body"]
    return {**body, "meta_info": body["meta_info"] | {"hidden_states": states}}


def with_value(value: float | None) -> dict[str, Any]:
    states = rows(10, 1)
    states[0][4] = [*states[0][4][:-1], value]
    return stated(states)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (with_value(float("nan")), "states.not_finite"),
        (with_value(float("-inf")), "states.not_finite"),
        (with_value(1e39), "states.not_finite"),
        (with_value(None), "states.not_finite"),
        (stated([[[0.0] * 128] * 10]), "states.zero"),
        (stated([*rows(10, 1), [1.0] * 128]), "states.short"),
        (stated([[[1.0] * 64] * 10]), "states.shape"),
        (stated(None), "states.missing"),
        (stated([[]]), "states.short"),
        (stated([3]), "reply.garbage"),
        ({"text": "x"}, "reply.garbage"),
        (b'{"text": "x", "output', "reply.garbage"),
        (b"", "reply.garbage"),
        (b"[]", "reply.garbage"),
        (b"\xff\xfe", "reply.garbage"),
    ],
)
def test_states_that_are_not_what_was_asked_leave_nothing(
    spool: Spool, tmp_path: Path, content: Any, code: str
) -> None:
    with pytest.raises(CallError) as caught:
        decode(job(tmp_path / "b", content, 10), spool)
    assert caught.value.code == code
    assert list(spool.folder.iterdir()) == []


def test_an_aborted_reply_is_passed_on_without_states(spool: Spool, tmp_path: Path) -> None:
    content = decode(job(tmp_path / "b", recorded("final-aborted")["body"], 30), spool)
    assert read_reply(content).finish == "abort"
    assert read_reply(content).states is None


def test_values_between_two_bf16_go_to_the_nearest_and_ties_to_even() -> None:
    # Neighbours of 1.0 in bf16 are 2⁻⁷ apart: 0x3F80 = 1.0, 0x3F81 = 1.0078125, 0x3F82 = 1.015625.
    step = 2.0**-7
    values = [
        1.0,
        1 + step / 4,
        1 + step / 2,
        1 + 3 * step / 4,
        1 + 3 * step / 2,
        -1 - step,
        0.0,
        -0.0,
        1e-45,
        4e38,
    ]
    bits = [0x3F80, 0x3F80, 0x3F80, 0x3F81, 0x3F82, 0xBF81, 0x0000, 0x8000, 0x0000, 0x7F80]
    assert bf16_bits(np.array(values)).tolist() == bits


def test_every_finite_bf16_passes_through_json_unchanged() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32)
    bits = bits[(bits & 0x7F80) != 0x7F80]
    text = json.dumps((bits << 16).astype(np.uint32).view(np.float32).tolist())
    assert (bf16_bits(np.array(json.loads(text))) == bits).all()


def test_decoders_work_side_by_side_and_end_with_their_pool(spool: Spool, tmp_path: Path) -> None:
    body = recorded("final-capture")["body"]
    jobs = [job(tmp_path / f"b{i}", body, 10, name=f"states-{i}") for i in range(5)]

    async def work() -> list[SpoolRef]:
        pool = DecodePool(spool)
        replies = await asyncio.gather(*(pool.decode(j) for j in jobs))
        await pool.close()
        return [reply.states.ref for reply in replies if reply.states]

    refs = asyncio.run(work())
    assert sorted(ref.name for ref in refs) == [f"states-{i}" for i in range(5)]
    assert len({ref.crc32 for ref in refs}) == 1
    assert children() == []


def test_a_decoder_finds_its_own_modules_from_any_folder(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job(tmp_path / "b", recorded("final-capture")["body"], 10)
    # No installation and no working folder to find them by; `celery` must not be our `celery.py`.
    (tmp_path / "celery").mkdir()
    monkeypatch.chdir(tmp_path / "celery")
    monkeypatch.setenv("PYTHONPATH", "")
    probe = "import celery, workers.sglang.decode; print(celery.__name__, hasattr(celery, 'VERSION'))"

    async def work() -> bool:
        pool = DecodePool(spool)
        reply = await pool.decode(asked)
        await pool.close()
        return reply.states is not None

    assert asyncio.run(work())
    environ = decoder_environ()
    said = subprocess.run(
        [sys.executable, "-c", probe], env=environ, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["celery", "True"]


def test_a_pool_passes_on_what_its_decoder_refused(tmp_path: Path) -> None:
    async def work(spool: Spool, asked: DecodeJob) -> None:
        pool = DecodePool(spool)
        try:
            await pool.decode(asked)
        finally:
            await pool.close()

    roomy = Spool(tmp_path / "roomy", "here", 1 << 30)
    with pytest.raises(CallError, match="8 of 40 rows"):
        asyncio.run(work(roomy, job(tmp_path / "b", recorded("chunked-capture")["body"], 40)))
    full = Spool(tmp_path / "full", "here", 100)
    with pytest.raises(FullError):
        asyncio.run(work(full, job(tmp_path / "b", recorded("final-capture")["body"], 10)))


def test_a_decoder_that_dies_costs_one_attempt_and_the_next_gets_another(
    spool: Spool, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    good = job(tmp_path / "b", recorded("final-capture")["body"], 10)
    # Opening a pipe that nobody writes to waits: the decoder is in mid-job for as long as we like.
    stuck = DecodeJob(**{name: getattr(good, name) for name in DecodeJob.__slots__} | {"body": str(fifo)})

    async def work() -> str:
        pool = DecodePool(spool, processes=1)
        waiting = asyncio.create_task(pool.decode(stuck))
        async with asyncio.timeout(20):
            while not children():
                await asyncio.sleep(0.01)
        os.kill(children()[0], signal.SIGKILL)
        with pytest.raises(CallError) as caught:
            await waiting
        await pool.decode(good)
        await pool.close()
        return caught.value.code

    assert asyncio.run(work()) == "states.decoder"
    assert [path.name for path in spool.folder.iterdir()] == ["states"]


def test_a_cancelled_decode_leaves_no_file(spool: Spool, tmp_path: Path) -> None:
    asked = job(tmp_path / "b", recorded("final-capture")["body"], 10)

    async def work() -> None:
        pool = DecodePool(spool)
        task = asyncio.create_task(pool.decode(asked))
        async with asyncio.timeout(20):
            while not children():
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.close()

    asyncio.run(work())
    assert list(spool.folder.iterdir()) == []


def test_a_killed_lane_leaves_no_decoder(tmp_path: Path) -> None:
    body = tmp_path / "b"
    asked = job(body, recorded("final-capture")["body"], 10)
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from storage.spool import Spool\n"
        "from workers.sglang.decode import DecodeJob\n"
        "from workers.sglang.decoding import DecodePool\n"
        "async def main():\n"
        f"    pool = DecodePool(Spool(Path({str(tmp_path / 'spool')!r}), 'here', 1 << 30))\n"
        f"    await pool.decode({asked!r})\n"
        "    print('decoded', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as lane:
        assert lane.stdout is not None
        assert lane.stdout.readline() == b"decoded\n"
        (decoder,) = children(lane.pid)
        lane.kill()
    deadline = time.monotonic() + 20
    while alive(decoder):
        assert time.monotonic() < deadline, "the decoder outlived its lane"
        time.sleep(0.01)


def children(of: int | None = None) -> list[int]:
    """Decoders that `of`, by default this one, has started and that still run; never its other children."""
    found = []
    for task in Path(f"/proc/{of or os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if alive(pid) and is_decoder(pid)]


def is_decoder(pid: int) -> bool:
    try:
        return b"decode" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
