"""One node, as ops/sglang/README.md writes it: generate everything, restart, capture everything."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from storage.store import Store
from tests.sglang.comparison import Reference, Tally, stored_samples
from tests.sglang.conftest import Servers
from tests.sglang.environment.build import Environment
from tests.sglang.flavours import CAPTURE, GENERATE
from tests.sglang.jobs import Office, flags_of, write_prompts

pytestmark = pytest.mark.sglang
EAGLE3 = (2, 4, 5, 8)
PROMPTS = 40


def test_everything_is_generated_and_after_a_restart_captured_by_the_recipes(
    servers: Servers,
    environment: Environment,
    office: Office,
    plugin_environ: Mapping[str, str],
    reference: Reference,
    tally: Tally,
) -> None:
    write_prompts(office.machine.folder / "node.jsonl", PROMPTS, seed=9)
    job = flags_of(manifest="node.jsonl", model=environment.model, temperature=0, short_max_tokens=40)
    generating = servers.get(GENERATE).url
    output = office.run("node", *job, *flags_of(server_url=generating, states="off"))
    generated = {one.id: Store.open(output).response(one.id) for one in Store.open(output).prompts("node")}

    capturing = servers.get(replace(CAPTURE, environ=plugin_environ)).url
    office.run("node", *job, *flags_of(server_url=capturing, states="replay", capture="eagle3"))
    store = Store.open(output)
    assert {one: store.response(one).tokens.tolist() for one in generated} == {
        one: response.tokens.tolist() for one, response in generated.items()
    }, "nothing is generated again"
    samples = stored_samples(output)
    assert len(samples) == PROMPTS
    found = reference.compare(samples, EAGLE3)
    tally.found["generate.sh, then capture.sh"] = found
    found.check()
    found.check_greedy()
