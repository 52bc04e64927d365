"""What servers say of themselves, from the replies of a real one."""

import asyncio
import copy
import json
import socket
from typing import Any

import pytest
from client_stage import recorded, staged

from storage.errors import UnavailableError, UnsuitableError
from workers.sglang.address import server_url
from workers.sglang.client import SGLangClient
from workers.sglang.facts import ServerFacts, fetch_facts, read_facts

PLUGIN = {
    "plugin": 1,
    "node": "gpu-1",
    "hs_indices": {"eagle3": [2, 4, 5, 8], "aux": [2, 4, 5], "final": [8]},
    "hidden_size": 128,
    "num_layers": 8,
    "norm": "post",
    "kv_dtype": "bfloat16",
    "vocab_size": 2000,
}


def facts_of(flavour: str, **info: Any) -> ServerFacts:
    bodies = [
        copy.deepcopy(recorded(f"{flavour}-{n}")["body"]) for n in ("server_info", "model_info", "models")
    ]
    return read_facts(bodies[0] | info, bodies[1], bodies[2])


def test_a_real_server_started_for_final_states_is_read() -> None:
    facts = facts_of("final")
    assert (facts.model, facts.architecture, facts.sglang) == (
        "/models/tiny-llama",
        "LlamaForCausalLM",
        "0.5.23",
    )
    assert (facts.context_length, facts.max_input_tokens, facts.max_total_tokens) == (2048, 2042, 16384)
    assert (facts.states, facts.aux_states, facts.chunked_prefill_size) == ("json", False, None)
    assert facts.radix_cache
    assert facts.speculative_algorithm is None
    assert facts.vocab_size is None


def test_flags_of_other_servers_are_told_apart() -> None:
    assert facts_of("off").states == "off"
    assert facts_of("off").chunked_prefill_size == 4096
    assert facts_of("chunked").chunked_prefill_size == 32
    aux = facts_of("aux")
    assert (aux.states, aux.aux_states, aux.aux_layer_ids, aux.speculative_algorithm) == (
        "json",
        True,
        None,
        None,
    )
    assert facts_of("final", return_hidden_states_mode="last").states == "off"


def test_a_server_with_the_plugin_says_what_its_model_gives() -> None:
    facts = facts_of("off", eyas=PLUGIN)
    assert facts.states == "plugin"
    assert facts.plugin is not None
    assert facts.plugin.hs_indices["eagle3"] == (2, 4, 5, 8)
    assert facts.vocab_size == 2000


def test_the_keys_in_server_info_reach_no_fact() -> None:
    info = recorded("final-server_info")["body"]
    assert "KEY-THAT-MUST-NOT-LEAK" in json.dumps(info)
    facts = facts_of("final", admin_api_key="ANOTHER-KEY", launch_command="--api-key ANOTHER-KEY")
    assert "KEY" not in json.dumps(facts.to_json()) + repr(facts)


@pytest.mark.parametrize("more", [{}, {"eyas": PLUGIN}, {"return_aux_hidden_state_layer_ids": [1, 3]}])
def test_facts_survive_json_and_alike_servers_have_one_id(more: dict[str, Any]) -> None:
    facts = facts_of("final", **more)
    again = ServerFacts.from_json(json.loads(json.dumps(facts.to_json())))
    assert again == facts
    assert again.facts_id == facts_of("final", **more, startup_time=5).facts_id
    assert again.facts_id != facts_of("final", **more, kv_cache_dtype="fp8_e4m3").facts_id


def test_what_is_no_sglang_server_is_named_so() -> None:
    with pytest.raises(UnsuitableError) as caught:
        read_facts({"hello": 1}, {}, {})
    assert caught.value.code == "server.not_sglang"


def test_no_server_there_is_one_error_with_what_to_do() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(UnavailableError) as caught:
        fetch_facts(f"http://127.0.0.1:{port}")
    assert caught.value.code == "server.unreachable"
    assert caught.value.exit_status == 3
    assert "--server-url" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("infos", "code"),
    [
        ({"/server_info": 401}, "server.key"),
        ({"/server_info": None}, "server.not_sglang"),
        ({"/server_info": []}, "server.not_sglang"),
    ],
)
def test_a_server_that_cannot_be_used_says_why(infos: dict[str, Any], code: str) -> None:
    async def ask() -> None:
        async with staged() as stage, SGLangClient("key") as client:
            stage.infos |= infos
            await client.facts(stage.url)

    with pytest.raises(UnsuitableError) as caught:
        asyncio.run(ask())
    assert caught.value.code == code
    assert "http://127.0.0.1" in caught.value.message


def test_the_embedded_engine_is_not_taken_for_a_plugin() -> None:
    assert facts_of("off", eyas=PLUGIN, eyas_engine=True).says() == (
        "Eyas's embedded engine, states: through the spool"
    )
    assert facts_of("off", eyas=PLUGIN).says() == "SGLang 0.5.23, states: by the plugin, through the spool"
    assert facts_of("final", eyas_engine=True).says() == "Eyas's embedded engine, states: as JSON"
    assert facts_of("final").says() == "SGLang 0.5.23, states: as JSON"
    assert facts_of("off").says() == "SGLang 0.5.23, states: none"


def test_facts_of_an_older_version_are_read_and_nonsense_is_not() -> None:
    content = facts_of("final").to_json()
    older = {key: value for key, value in content.items() if key not in ("embedded", "dcp_size")}
    assert ServerFacts.from_json(older | {"of_a_newer_one": 1}) == facts_of("final")
    with pytest.raises(ValueError, match="context_length"):
        ServerFacts.from_json(content | {"context_length": "long"})


def test_facts_come_through_a_router_that_knows_only_the_old_routes() -> None:
    async def ask() -> ServerFacts:
        async with staged() as stage, SGLangClient() as client:
            for name in ("server_info", "model_info"):
                stage.infos[f"/get_{name}"] = stage.infos.pop(f"/{name}")
            return await client.facts(stage.url)

    assert asyncio.run(ask()) == facts_of("final")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:30000", "http://localhost:30000"),
        (" https://h/v/ ", "https://h/v"),
        ("http://[::1]:1", "http://[::1]:1"),
    ],
)
def test_addresses_have_one_spelling(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize("text", ["", "ftp://h", "http://user:key@h", "http://h?x=1", "two words"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="not a server's address"):
        server_url(text)
