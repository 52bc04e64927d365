"""A lane without its queue: a client, a spool and decoders, connected to one stage."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from client_stage import (
    Handler,
    Stage,
    answer,
    staged,
)
from test_client_facts import PLUGIN

from storage.run import CaptureSpec, Run, RunSpec, Sampling, StatesMode
from storage.sample import Kind, Span
from storage.settings import RunSettings
from storage.spool import Spool
from storage.tokens import as_tokens
from workers.broker.messages import Capture, Generate, Result, decode, encode
from workers.runs import RunView
from workers.sglang.attempt import Context
from workers.sglang.client import SGLangClient
from workers.sglang.decoding import DecodePool
from workers.sglang.execute import execute
from workers.sglang.facts import read_facts
from workers.sglang.outcomes import Backoff

FINAL = CaptureSpec(name="final", hs_indices=(8,), norm="post", hidden_size=128)
PROMPT = as_tokens(range(20, 30))
GENERATE = Generate(
    run="r",
    id=b"i" * 16,
    dataset="B1",
    lane="short",
    prompt=PROMPT,
    spans=(Span(start=0, end=10, turn=0, kind=Kind.USER),),
    max_new_tokens=5,
)
CAPTURE = Capture(
    run="r",
    id=b"i" * 16,
    digest=b"d" * 16,
    dataset="B1",
    tokens=as_tokens(range(20, 40)),
    prompt_length=10,
    capture="final",
)
GOOD = answer()


def view(states: StatesMode = StatesMode.REPLAY, **changed: Any) -> RunView:
    spec = RunSpec(
        model="tiny-llama",
        tokenizer_digest="t",
        template_digest="t",
        vocab_size=2000,
        sampling=Sampling(temperature=0.7, top_p=0.9, top_k=40, seed=3),
        short_max_tokens=100,
        long_max_tokens=200,
        states=states,
        capture=FINAL,
    )
    usual = {
        "server_urls": (),
        "capture_urls": (),
        "concurrency": {},
        "max_input_tokens": 2042,
        "states": states,
        "capture": FINAL,
    }
    return RunView(
        run=Run(id="r", spec=spec), settings=RunSettings(**{**usual, **changed}), output_dir="/out"
    )


class Lane:
    """A client, a spool and decoders, connected to one stage."""

    def __init__(self, stage: Stage, client: SGLangClient, spool: Spool, seen: RunView) -> None:
        self.stage, self.spool = stage, spool
        infos = stage.infos
        facts = read_facts(infos["/server_info"], infos["/model_info"], infos["/v1/models"])
        quick = Backoff(first_s=0.01, longest_s=0.01)
        self.context = Context(
            client=client,
            spool=spool,
            decoders=DecodePool(spool, processes=1),
            view=seen,
            facts={stage.url: facts},
            again=quick,
            busy=quick,
        )

    async def execute(self, order: Generate | Capture) -> Result:
        result = await execute(order, self.stage.url, self.context)
        assert decode(encode(result)).run == "r", "a result travels"
        return result

    def files(self) -> list[str]:
        return [path.name for path in self.spool.folder.iterdir()]


def play(
    tmp_path: Path,
    scene: Callable[[Lane], Awaitable[None]],
    *,
    generate: Handler = GOOD,
    seen: RunView | None = None,
    flavour: str = "final",
    plugin: bool | str = False,
    max_bytes: int = 1 << 30,
) -> None:
    """The scene, on a stage whose server answers calls as `generate` does.

    `plugin` makes it one with the plugin, on the lane's own node or the one named.
    """

    async def run() -> None:
        async with staged(flavour) as stage, SGLangClient() as client:
            stage.generate = generate
            if plugin:
                stage.infos["/server_info"]["eyas"] = PLUGIN | {
                    "node": plugin if isinstance(plugin, str) else "here"
                }
            lane = Lane(stage, client, Spool(tmp_path / "spool", "here", max_bytes), seen or view())
            try:
                await scene(lane)
            finally:
                await lane.context.decoders.close()

    asyncio.run(run())
