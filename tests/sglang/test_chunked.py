"""A stock SGLang that chunks, retracts and caches: no reply that lacks a row becomes a sample.

The product does not capture on such a server at all; the thousand calls here go past that check.
"""

import asyncio
import random
import re
from pathlib import Path

import numpy as np
import pytest

from storage.run import CaptureSpec, Run, RunSpec, Sampling, StatesMode
from storage.settings import RunSettings
from storage.spool import Spool
from storage.tokens import as_tokens
from tests.sglang.comparison import Compared, Reference, Tally, stored_samples
from tests.sglang.conftest import Servers
from tests.sglang.environment.build import Environment
from tests.sglang.flavours import CHUNKING, FINAL
from tests.sglang.jobs import Office, flags_of, write_prompts
from workers.broker.messages import Failed, Generate, Responded, Result
from workers.runs import RunView
from workers.sglang.attempt import Context
from workers.sglang.client import SGLangClient
from workers.sglang.decoding import DecodePool
from workers.sglang.execute import execute
from workers.sglang.facts import ServerFacts, fetch_facts
from workers.sglang.outcomes import Backoff

pytestmark = pytest.mark.sglang
CALLS = 1000
AT_ONCE = 64
LENGTHS = (*range(4, 64, 2), 70, 100, 130)
"""Of prompts, tokens; the last three are more than one chunk."""
NEW_TOKENS = 24
SENTENCE = re.compile(
    r"\d+ of \d+ rows: the server chunked the prefill; start it with `--chunked-prefill-size -1`"
)
FINAL_STATE = CaptureSpec(name="final", hs_indices=(8,), norm="post", hidden_size=128)
AT_ONCE_AGAIN = Backoff(first_s=0.01, longest_s=0.01)


def test_of_a_thousand_inline_calls_each_is_whole_or_refused_with_the_flag_to_change(
    servers: Servers, environment: Environment, tmp_path: Path, reference: Reference, tally: Tally
) -> None:
    url = servers.get(CHUNKING).url
    spool = Spool(tmp_path / "spool", "here", 1 << 30)
    results = asyncio.run(call(url, fetch_facts(url), environment, spool))
    refused = [one.failure for one in results if isinstance(one, Failed)]
    whole = [one for one in results if isinstance(one, Responded)]
    assert len(refused) + len(whole) == CALLS
    assert len(refused) > CALLS // 20
    for failure in refused:
        assert failure.code == "states.short"
        assert SENTENCE.fullmatch(failure.message), failure.message
        assert failure.attempts == 3
    assert {path.name for path in spool.folder.iterdir()} == {one.states.spool.name for one in whole}
    found = reference.compare([read(one, spool) for one in whole], FINAL_STATE.hs_indices)
    retracted = sum(one.response.retractions > 0 for one in whole)
    assert retracted >= 5
    what = f"stock that chunks, {CALLS} inline calls, {len(refused)} refused, {retracted} repaired"
    tally.found[what] = found
    found.check()


def test_such_a_server_is_refused_for_capture_before_the_first_sample(
    servers: Servers, office: Office
) -> None:
    write_prompts(office.machine.folder / "few.jsonl", 3)
    flags = flags_of(manifest="few.jsonl", server_url=servers.get(CHUNKING).url, capture="final")
    refused = office.enqueue("refused", *flags)
    assert refused.returncode == 3
    assert "start it with `--chunked-prefill-size -1`" in refused.stderr
    assert not (office.machine.folder / "refused").exists()


def test_it_generates_all_and_once_restarted_as_a_capture_server_gives_all_states(
    servers: Servers, office: Office, reference: Reference, tally: Tally
) -> None:
    write_prompts(office.machine.folder / "later.jsonl", 60, seed=3)
    job = flags_of(manifest="later.jsonl", temperature=0, short_max_tokens=60)
    office.run("later", *job, *flags_of(server_url=servers.get(CHUNKING).url, states="off"))
    restarted = servers.get(FINAL)
    output = office.run("later", *job, *flags_of(server_url=restarted.url, states="replay", capture="final"))
    samples = stored_samples(output)
    assert len(samples) == 60
    found = reference.compare(samples, FINAL_STATE.hs_indices)
    tally.found["stock, generated on one that chunks, captured after its restart"] = found
    found.check()
    found.check_greedy()


async def call(url: str, facts: ServerFacts, environment: Environment, spool: Spool) -> list[Result]:
    """A thousand prompts, each generated and captured in one call."""
    rng = random.Random(4)
    orders = [
        Generate(
            run="r",
            id=number.to_bytes(16),
            dataset="B",
            lane="short",
            prompt=as_tokens([rng.randrange(6, 500) for _ in range(rng.choice(LENGTHS))]),
            spans=(),
            max_new_tokens=rng.randint(1, NEW_TOKENS),
        )
        for number in range(CALLS)
    ]
    room = asyncio.Semaphore(AT_ONCE)
    async with SGLangClient() as client:
        context = Context(
            client=client,
            spool=spool,
            decoders=DecodePool(spool, processes=1),
            view=inline_view(environment),
            facts={url: facts},
            again=AT_ONCE_AGAIN,
            busy=AT_ONCE_AGAIN,
        )

        async def one(order: Generate) -> Result:
            async with room:
                return await execute(order, url, context)

        try:
            return await asyncio.gather(*map(one, orders))
        finally:
            await context.decoders.close()


def inline_view(environment: Environment) -> RunView:
    """A run that takes the final state while it generates."""
    spec = RunSpec(
        model=str(environment.model),
        tokenizer_digest="",
        template_digest="",
        vocab_size=512,
        sampling=Sampling(),
        short_max_tokens=NEW_TOKENS,
        long_max_tokens=NEW_TOKENS,
        states=StatesMode.INLINE,
        capture=FINAL_STATE,
    )
    settings = RunSettings(
        server_urls=(),
        capture_urls=(),
        concurrency={},
        max_input_tokens=2042,
        states=StatesMode.INLINE,
        capture=FINAL_STATE,
    )
    return RunView(run=Run(id="r", spec=spec), settings=settings, output_dir="")


def read(result: Responded, spool: Spool) -> Compared:
    """The response with its rows out of the spool, one for each token but the last."""
    response = result.response
    assert result.states is not None
    states = np.concatenate([block.copy() for block in spool.blocks(result.states.spool)])
    assert len(states) == len(response.tokens) - 1
    return Compared(tokens=response.tokens, prompt_length=response.prompt_length, states=states)
