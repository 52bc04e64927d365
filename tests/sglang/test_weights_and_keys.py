"""What a real server says of itself: its keys stay with it, and weights replaced under a run are noticed."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import httpx
import pytest
import redis

from storage.store import Store
from tests.sglang.conftest import Servers
from tests.sglang.flavours import FINAL, Flavour
from tests.sglang.jobs import Office, flags_of, write_prompts
from tests.system.machine import machine_in
from workers.sglang.facts import ServerFacts

pytestmark = pytest.mark.sglang
KEY, ADMIN_KEY = "a-key-that-stays-secret", "an-admin-key-that-stays-secret"
KEYED = Flavour(
    name="keyed", flags=(*FINAL.flags, "--api-key", KEY, "--admin-api-key", ADMIN_KEY), environ=FINAL.environ
)
PROMPTS = 120


@pytest.fixture(scope="module")
def keyed_office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    """A machine whose lanes know the key."""
    with machine_in(tmp_path_factory.mktemp("keyed")) as machine:
        machine.environment |= {
            "EYAS_NODE": "here",
            "EYAS_SPOOL_DIR": str(machine.folder / "spool"),
            "EYAS_SERVER_API_KEY": KEY,
            "EYAS_LOG_LEVEL": "debug",
        }
        up = machine.up("--no-flower")
        assert up.returncode == 0, up.stderr
        yield Office(machine)
        machine.producer("down")


def test_weights_replaced_in_mid_run_stop_the_server_until_they_are_back(
    servers: Servers, keyed_office: Office
) -> None:
    machine, url = keyed_office.machine, servers.get(KEYED).url
    write_prompts(machine.folder / "k.jsonl", PROMPTS, longest_words=20, seed=8)
    flags = flags_of(manifest="k.jsonl", server_url=url, capture="final", short_max_tokens=40)
    enqueued = keyed_office.enqueue("keyed", *flags, "--short-concurrency", "8")
    assert enqueued.returncode == 0, enqueued.stderr
    until(lambda: status(keyed_office)["done"] >= 5, "it is at work")

    name_weights(url, "step-2")
    until(lambda: only_server(keyed_office)["state"] == "unsuitable", "the change is known")
    reason = only_server(keyed_office)["reason"]
    assert "changed since the run began with it: weights `default` → `step-2`" in reason
    assert "run `producer enqueue` for this run again" in reason
    assert status(keyed_office)["done"] < PROMPTS

    name_weights(url, "default")
    output = keyed_office.run("keyed", *flags)
    store = Store.open(output)
    stored = [store.response(prompt.id) for prompt in store.prompts("k")]
    assert len(stored) == PROMPTS
    for name in {response.facts_id for response in stored}:
        kept = json.loads((output / "facts" / f"{name}.json").read_text())
        assert kept["weight_version"] == "default"


def test_no_key_is_in_the_store_in_a_log_or_in_redis(servers: Servers, keyed_office: Office) -> None:
    """After the job above, whose server says both keys to anybody who holds one."""
    machine, url = keyed_office.machine, servers.get(KEYED).url
    info = httpx.get(f"{url}/server_info", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert (info["api_key"], info["admin_api_key"]) == (KEY, ADMIN_KEY)
    wrong = Office(machine_with(keyed_office, "another-key"))
    refused = wrong.enqueue("refused", *flags_of(manifest="k.jsonl", server_url=url, capture="final"))
    assert refused.returncode == 3
    assert "set EYAS_SERVER_API_KEY" in refused.stderr
    assert "another-key" not in refused.stderr

    for kept in (machine.folder / "keyed" / "facts").iterdir():
        assert set(json.loads(kept.read_text())) == {field.name for field in fields(ServerFacts)}
    assert machine.producer("status").returncode == 0
    held = redis_content(machine.state["redis_url"])
    assert "eyas:facts" in held
    found = [name for name, content in held.items() if secret(content)]
    files = [path for path in machine.folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" and path.stat().st_size for path in files)
    found += [str(path) for path in files if secret(path.read_bytes())]
    assert found == []


def secret(content: bytes) -> bool:
    return KEY.encode() in content or ADMIN_KEY.encode() in content


def machine_with(office: Office, key: str) -> Any:
    """The same machine, at which a person gives another key."""
    other = object.__new__(type(office.machine))
    other.__dict__.update(office.machine.__dict__)
    other.environment = {**office.machine.environment, "EYAS_SERVER_API_KEY": key}
    return other


def redis_content(url: str) -> dict[str, bytes]:
    """Every key of the database, with its value in Redis's own serialization."""
    with redis.Redis.from_url(url) as client:
        client.config_set("rdbcompression", "no")
        return {name.decode(): client.dump(name) or b"" for name in client.scan_iter()}


def name_weights(url: str, version: str) -> None:
    """As after an update from disk, whose requests this takes instead of reading weights."""
    answer = httpx.post(
        f"{url}/update_weight_version",
        headers={"Authorization": f"Bearer {ADMIN_KEY}"},
        json={"new_version": version, "abort_all_requests": False},
    )
    assert answer.status_code == 200, answer.text


def status(office: Office) -> dict[str, Any]:
    said = office.machine.producer("status", "--json")
    assert said.stdout, said.stderr
    content: dict[str, Any] = json.loads(said.stdout)
    return content


def only_server(office: Office) -> dict[str, Any]:
    (found,) = status(office)["servers"]
    return dict(found)


def until(condition: Callable[[], Any], what: str, within_s: float = 90.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.2)
