"""The plugin in a server without auxiliary layers: the final state alone, bit for bit a stock reply's."""

import httpx
import numpy as np
import pytest
from asking import Asker, as_floats, prompts
from serving import serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def whole(environment, tmp_path_factory):
    """Without auxiliary layers and chunks."""
    folder = tmp_path_factory.mktemp("whole")
    with serve(
        environment, folder, "--enable-return-hidden-states", "--chunked-prefill-size", "-1"
    ) as server:
        yield Asker(server.url, folder / "spool")


def test_without_auxiliary_layers_the_final_state_alone_is_given(whole):
    with httpx.Client(base_url=whole.url) as client:
        assert client.get("/server_info").json()["eyas"]["hs_indices"] == {"final": [8]}
    said = whole.ask(prompts(1, 30, 30)[0]).said
    assert said["hs_indices"] == [8]
    assert whole.rows(said).shape == (30, 1, 128)


def test_the_bits_are_those_of_a_stock_reply(whole):
    prompt = prompts(1, 50, 50, seed=4)[0]
    stock = whole.ask(prompt, 4, sampling={"custom_params": None})
    block, *single = stock.meta["hidden_states"]
    floats = np.array([*block, *single], np.float32)
    rows = whole.rows(whole.ask(prompt, 4).said)
    assert (as_floats(rows[:, 0]) == floats).all()
