"""Whole jobs on a real SGLang with the plugin that chunks, retracts and caches: every sample is stored."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from storage.store import Store
from tests.sglang.comparison import Reference, Tally, stored_samples
from tests.sglang.conftest import Servers
from tests.sglang.flavours import CHUNKING_EAGLE3, Flavour
from tests.sglang.jobs import Office, flags_of, write_prompts, write_tokenized

pytestmark = pytest.mark.sglang
EAGLE3 = (2, 4, 5, 8)
PROMPTS = 1000


@pytest.fixture(scope="module")
def with_plugin(plugin_environ: Mapping[str, str]) -> Flavour:
    """The server with this tree's plugin."""
    return replace(CHUNKING_EAGLE3, environ={**CHUNKING_EAGLE3.environ, **plugin_environ})


def test_a_thousand_prompts_are_all_stored_at_the_first_attempt_with_layers_and_final_state(
    servers: Servers, with_plugin: Flavour, office: Office, reference: Reference, tally: Tally
) -> None:
    write_prompts(office.machine.folder / "p.jsonl", PROMPTS, longest_words=50, seed=5)
    url = servers.get(with_plugin).url
    output = office.run(
        "plugin-inline",
        *flags_of(manifest="p.jsonl", server_url=url, states="inline", short_max_tokens=24),
    )
    samples = stored_samples(output, last_row=False)
    assert len(samples) == PROMPTS
    store = Store.open(output)
    assert {store.response(prompt.id).attempt for prompt in store.prompts("p")} == {1}
    retracted = sum(one.retractions > 0 for one in samples)
    assert retracted >= 10
    found = reference.compare(samples, EAGLE3)
    tally.found[f"plugin, inline, chunks of 64, {retracted} samples retracted"] = found
    found.check()


def test_replayed_responses_and_given_tokens_have_all_their_rows(
    servers: Servers, with_plugin: Flavour, office: Office, reference: Reference, tally: Tally
) -> None:
    folder = office.machine.folder
    write_prompts(folder / "pb.jsonl", 60, seed=6)
    write_tokenized(folder / "pa.jsonl", 40, seed=6)
    (folder / "plugin.toml").write_text(
        '[[dataset]]\nname = "B"\nsource = "file:pb.jsonl"\n'
        '[[dataset]]\nname = "A"\nsource = "file:pa.jsonl"\nlane = "capture"\n'
    )
    url = servers.get(with_plugin).url
    output = office.run(
        "plugin-replay", *flags_of(manifest="plugin.toml", server_url=url, short_max_tokens=40)
    )
    samples = stored_samples(output)
    assert len(samples) == 100
    found = reference.compare(samples, EAGLE3)
    tally.found["plugin, replay, chunks of 64"] = found
    found.check()
    assert list((folder / "spool").iterdir()) == []
