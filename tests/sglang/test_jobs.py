"""Whole jobs through Celery on a real, stock SGLang: every stored row is transformers' own."""

from dataclasses import replace

import pytest

from tests.sglang.comparison import MOST_ERROR, Compared, Reference, Tally, stored_samples
from tests.sglang.conftest import Servers
from tests.sglang.flavours import AUX_ON_TWO_RANKS, FINAL, Flavour
from tests.sglang.jobs import Office, flags_of, write_prompts, write_tokenized

pytestmark = pytest.mark.sglang
FINAL_STATE = (8,)
AUXILIARY = (2, 4, 5)


@pytest.fixture(scope="module")
def final_samples(servers: Servers, office: Office) -> list[Compared]:
    """What a greedy job stores: 60 responses, and 20 rows that came with their tokens."""
    folder = office.machine.folder
    write_prompts(folder / "b.jsonl", 60)
    write_tokenized(folder / "a.jsonl", 20)
    (folder / "both.toml").write_text(
        '[[dataset]]\nname = "B"\nsource = "file:b.jsonl"\n'
        '[[dataset]]\nname = "A"\nsource = "file:a.jsonl"\nlane = "capture"\n'
    )
    url = servers.get(FINAL).url
    flags = flags_of(
        manifest="both.toml", server_url=url, capture="final", temperature=0, short_max_tokens=40
    )
    return stored_samples(office.run("final", *flags))


def test_generated_and_given_tokens_are_stored_with_the_final_state_of_each(
    final_samples: list[Compared], reference: Reference, tally: Tally
) -> None:
    assert (len(final_samples), sum(one.given for one in final_samples)) == (80, 20)
    found = reference.compare(final_samples, FINAL_STATE)
    tally.found["stock, replay, final state"] = found
    found.check()


def test_greedy_responses_are_those_of_transformers(
    final_samples: list[Compared], reference: Reference
) -> None:
    found = reference.compare([one for one in final_samples if not one.given], FINAL_STATE)
    assert found.positions > 1000
    found.check_greedy()


def test_one_row_that_is_not_its_tokens_own_is_found(
    final_samples: list[Compared], reference: Reference
) -> None:
    rows = final_samples[0].states.copy()
    rows[5] = rows[4]
    found = reference.compare([replace(final_samples[0], states=rows), *final_samples[1:3]], FINAL_STATE)
    assert found.worst_cosine < 0.99
    assert found.worst_error > MOST_ERROR


def test_states_taken_while_requests_are_retracted_lack_no_row_and_repeat_none(
    servers: Servers, office: Office, reference: Reference, tally: Tally
) -> None:
    write_prompts(office.machine.folder / "r.jsonl", 100, longest_words=40, seed=1)
    url = servers.get(FINAL).url
    output = office.run(
        "retracted",
        *flags_of(manifest="r.jsonl", server_url=url, capture="final", states="inline", short_max_tokens=200),
    )
    samples = stored_samples(output, last_row=False)
    assert len(samples) == 100
    retracted = sum(one.retractions > 0 for one in samples)
    assert retracted >= 1
    found = reference.compare(samples, FINAL_STATE)
    tally.found[f"stock, inline, {retracted} samples retracted"] = found
    found.check()


@pytest.mark.parametrize(
    ("flavour", "capture", "said"),
    [
        (
            FINAL,
            "eagle3",
            (
                "is a stock SGLang: it gives auxiliary layers or the final state, not both",
                "`--capture eagle3` asks for",
                "`pip install --no-deps eyas` in SGLang's environment",
                "`--capture final`, or with `--capture aux` once",
                "`--enable-return-aux-hidden-states --speculative-algorithm EAGLE3`",
            ),
        ),
        (
            FINAL,
            "aux",
            (
                "gives the final state, not auxiliary layers",
                "start it with `--enable-return-aux-hidden-states --speculative-algorithm EAGLE3`",
                "`--capture final`",
            ),
        ),
        (FINAL, "1,3,5", ("--return-aux-hidden-state-layer-ids 0 2 4`",)),
        (FINAL, "1,3,9", ("asks for hidden state `9` of a model of `8` layers",)),
        (AUX_ON_TWO_RANKS, "final", ("auxiliary layers in place of the final state", "`--capture aux`")),
        (
            AUX_ON_TWO_RANKS,
            "1,3,5",
            (
                "gives the layers [2, 4, 5], `hs-1-3-5` is [1, 3, 5]",
                "--return-aux-hidden-state-layer-ids 0 2 4`",
            ),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Flavour) else value if isinstance(value, str) else "",
)
def test_what_a_stock_server_cannot_give_is_refused_with_the_ways_out(
    servers: Servers, office: Office, flavour: Flavour, capture: str, said: tuple[str, ...]
) -> None:
    write_prompts(office.machine.folder / "few.jsonl", 3)
    flags = flags_of(manifest="few.jsonl", server_url=servers.get(flavour).url, capture=capture)
    refused = office.enqueue("refused", *flags)
    print(refused.stderr)  # noqa: T201
    assert refused.returncode in (2, 3)
    for part in said:
        assert part in refused.stderr
    assert not (office.machine.folder / "refused").exists()


def test_two_data_parallel_ranks_give_the_auxiliary_layers_of_every_token(
    servers: Servers, office: Office, reference: Reference, tally: Tally
) -> None:
    write_prompts(office.machine.folder / "d.jsonl", 60, seed=2)
    url = servers.get(AUX_ON_TWO_RANKS).url
    output = office.run(
        "aux", *flags_of(manifest="d.jsonl", server_url=url, capture="aux", short_max_tokens=40)
    )
    samples = stored_samples(output)
    assert len(samples) == 60
    found = reference.compare(samples, AUXILIARY)
    tally.found["stock, replay, auxiliary layers, two ranks"] = found
    found.check()
