"""The plugin in servers of several ranks, and in such as it ends at their start."""

import httpx
import pytest
from asking import Asker, prompts
from serving import AUX, EAGLE3, check_rows, serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


def test_each_data_parallel_rank_writes_its_own(environment, tmp_path):
    with serve(
        environment,
        tmp_path,
        *AUX,
        *("--dp-size", "2", "--chunked-prefill-size", "64"),
        environ={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ) as server:
        asker = Asker(server.url, tmp_path / "spool")
        answers = asker.ask_all(prompts(12, 20, 150, seed=5), 10, at_once=6)
        assert {answer.meta["dp_rank"] for answer in answers} == {0, 1}
        check_rows(asker, answers, environment, tmp_path)
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/server_info").json()["eyas"]["hs_indices"]["eagle3"] == EAGLE3


def test_ranks_of_one_model_write_once(environment, tmp_path):
    with serve(
        environment, tmp_path, *AUX, "--tp-size", "2", environ={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    ) as server:
        asker = Asker(server.url, tmp_path / "spool")
        check_rows(asker, asker.ask_all(prompts(4, 20, 60, seed=6), 4, at_once=4), environment, tmp_path)


@pytest.mark.parametrize(
    ("flags", "plugins", "words"),
    [
        (("--tokenizer-worker-num", "2"), {}, "--tokenizer-worker-num 1"),
        ((), {"sglang": "9.9.9"}, "SGLang 9.9.9 was not tried with this plugin; tried: 0.5.23"),
        (("--return-aux-hidden-state-layer-ids", "1", "7"), {}, "cannot give auxiliary layer 8"),
    ],
)
def test_what_it_cannot_do_ends_the_server_at_its_start(environment, tmp_path, flags, plugins, words):
    with (
        pytest.raises(RuntimeError, match="did not start"),
        serve(environment, tmp_path, *AUX, *flags, **plugins),
    ):
        pass
    log = (tmp_path / "log").read_text()
    assert words in log
    assert "hint: " in log
