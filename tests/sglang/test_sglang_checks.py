"""The checks on a real SGLang: sound servers raise no alarm, and their figures are far from the limits."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.sample import SpoolRef
from storage.spool import Spool
from tests.sglang.comparison import Tally
from tests.sglang.conftest import Servers
from tests.sglang.environment.build import Environment
from tests.sglang.flavours import CHUNKING_EAGLE3, FINAL, Flavour
from tests.sglang.jobs import Office, flags_of, write_prompts, write_tokenized
from tests.sglang.plugin.asking import Asker, prompts
from workers.sglang.audit.measuring import measure
from workers.sglang.audit.output_head import find_head
from workers.sglang.audit.verdict import HEAD_ERROR, RMS_ERROR, ROW_ERROR, TYPICAL_ERROR, judged

pytestmark = pytest.mark.sglang
EVERY = 3
EAGLE3 = (2, 4, 5, 8)


@pytest.fixture(scope="module")
def with_plugin(plugin_environ: Mapping[str, str]) -> Flavour:
    """The server with this tree's plugin."""
    return replace(CHUNKING_EAGLE3, environ={**CHUNKING_EAGLE3.environ, **plugin_environ})


def checks_of(office: Office, tally: Tally, output: str, *flags: str) -> dict[str, Any]:
    """Run a job; what its checks came to."""
    office.run(output, *flags, *flags_of(check_every=EVERY))
    said = json.loads(office.machine.storage("info", output, "--json").stdout)
    (found,) = said["checks"].values()
    tally.checks[output] = (
        f"{found['samples']} samples, {found['rows']} rows, worst error {found['worst_error']:.4f}, median "
        f"{found['typical_error']:.4f}, output head within {found['head_error']:.4f} nats"
    )
    return dict(found)


def assert_sound(found: dict[str, Any], samples: int) -> None:
    """Without an alarm, and a fifth of the limits away from one."""
    assert samples / EVERY / 3 <= found["samples"] <= samples
    assert (found["alarmed"], found["alarms"], found["skipped"]) == (0, [], [])
    assert found["compared"] == found["with_head"] == found["samples"]
    assert found["worst_error"] < ROW_ERROR / 5
    assert found["typical_error"] < TYPICAL_ERROR / 5
    assert found["worst_cosine"] > 0.999
    assert found["head_error"] < HEAD_ERROR / 5


@pytest.mark.parametrize("mode", ["replay", "inline"])
def test_a_server_with_the_plugin_that_chunks_retracts_and_caches_is_sound(
    servers: Servers, with_plugin: Flavour, office: Office, tally: Tally, mode: str
) -> None:
    write_prompts(office.machine.folder / f"check-{mode}.jsonl", 30, seed=21)
    url = servers.get(with_plugin).url
    job = flags_of(manifest=f"check-{mode}.jsonl", server_url=url, short_max_tokens=40, states=mode)
    assert_sound(checks_of(office, tally, f"checks-{mode}", *job), 30)


def test_given_tokens_are_checked_and_their_log_probability_is_recorded(
    servers: Servers, with_plugin: Flavour, office: Office, tally: Tally
) -> None:
    write_tokenized(office.machine.folder / "check-given.jsonl", 20, seed=22)
    url = servers.get(with_plugin).url
    found = checks_of(office, tally, "checks-given", *flags_of(manifest="check-given.jsonl", server_url=url))
    assert_sound(found, 20)
    # random ids, for a model that has learnt nothing: about as likely as a guess among 512
    assert -np.log(512) - 0.5 < found["least_logprob"] < -np.log(512) + 0.5


def test_a_stock_server_is_sound(servers: Servers, office: Office, tally: Tally) -> None:
    write_prompts(office.machine.folder / "check-stock.jsonl", 20, seed=23)
    url = servers.get(FINAL).url
    job = flags_of(manifest="check-stock.jsonl", server_url=url, short_max_tokens=24, capture="final")
    assert_sound(checks_of(office, tally, "checks-stock", *job), 20)


def asked(asker: Asker, tokens: Sequence[int], count: int) -> tuple[SpoolRef, np.ndarray]:
    """Where the states of these tokens lie, and the server's log-probabilities of the last ones."""
    start = {"return_logprob": True, "logprob_start_len": len(tokens) - 1 - count}
    answer = asker.ask(list(tokens), eyas={"capture": "eagle3", "hs_indices": list(EAGLE3)}, **start)
    said = answer.said
    ref = SpoolRef(node=said["node"], name=said["name"], shape=tuple(said["shape"]), crc32=said["crc32"])
    values = [value for value, _, _ in answer.meta["input_token_logprobs"][1:]]
    return ref, np.array(values)


def test_what_a_real_server_gives_is_judged_wrong_once_it_is_spoiled(
    servers: Servers, with_plugin: Flavour, environment: Environment, tmp_path: Path
) -> None:
    spool_dir = Path(with_plugin.environ["EYAS_SPOOL_DIR"])
    asker = Asker(servers.get(with_plugin).url, spool_dir)
    there = Spool(spool_dir, with_plugin.environ["EYAS_NODE"], 1 << 40)
    here = Spool(tmp_path / "spool", "test", 1 << 40)
    head, count = find_head(str(environment.model)), 40
    tokens, others = prompts(2, 200, 200, seed=24)

    def states(of: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        ref, logprobs = asked(asker, of, count)
        rows = np.concatenate([block.copy() for block in there.blocks(ref)])
        there.delete(ref)
        return rows, logprobs

    def codes(first: np.ndarray, second: np.ndarray) -> set[str]:
        refs = [here.write(f"s-{number}", rows) for number, rows in enumerate((first, second))]
        last = len(tokens) - 1
        found = measure(here, *refs, final=3, norm=head.norm, tail=slice(last - count, last))
        assert found.tail is not None
        own = head.logprobs(found.tail, np.array(tokens[-count:], np.int32))
        check = judged(
            "http://server",
            hs_indices=EAGLE3,
            measured=found,
            server_logprobs=logprobs,
            answered=count,
            own_logprobs=own,
            vocab_size=512,
            skipped=(),
        )
        return {alarm.code for alarm in check.alarms}

    good, logprobs = states(tokens)
    again, _ = states(tokens)
    another, _ = states(others)
    assert codes(good, again) == set()
    one_row = good.copy()
    one_row[120] = another[120]
    assert codes(one_row, again) == {"states.row"}
    assert codes(np.roll(good, 1, axis=0), again) >= {"states.differ"}
    assert codes(np.ascontiguousarray(good[:, [0, 2, 1, 3]]), again) == {"states.differ"}
    assert codes(another, again) >= {"states.differ"}
    unnormed = good.copy()
    values = (good[:, 3].astype(np.uint32) << 16).view(np.float32) / head.norm * np.float32(1 + 2 * RMS_ERROR)
    unnormed[:, 3] = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert "states.norm" in codes(unnormed, unnormed)
    late = np.roll(another, 1, axis=0)
    assert codes(late, late) == {"head.differs"}
