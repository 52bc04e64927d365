"""States of a real SGLang over HTTP, for a lane of another node: bit for bit, behind the server's key."""

import asyncio
import secrets

import httpx
import numpy as np
import pytest
from asking import NODE, as_floats, body, prompts, worst_cosine
from serving import AUX, CLOSE, EAGLE3, serve

from storage.run import CaptureSpec, Run, RunSpec, Sampling, StatesMode
from storage.sample import SpoolRef
from storage.settings import RunSettings
from storage.spool import FETCHED, Spool
from storage.tokens import as_tokens
from workers.plugin.offering import PATH
from workers.runs import RunView
from workers.sglang.attempt import Context, ask_with_states
from workers.sglang.client import SGLangClient
from workers.sglang.decoding import DecodePool
from workers.sglang.passing import Passing
from workers.sglang.requests import capture_body
from workers.sglang.spool_probe import probe_spool

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
KEY = "the-key-of-the-tests"
CAPTURE = CaptureSpec(name="eagle3", hs_indices=tuple(EAGLE3), norm="post", hidden_size=128)
VIEW = RunView(
    run=Run(
        id="r",
        spec=RunSpec(
            model="m",
            tokenizer_digest="t",
            template_digest="t",
            vocab_size=2000,
            sampling=Sampling(),
            short_max_tokens=100,
            long_max_tokens=100,
            states=StatesMode.REPLAY,
            capture=CAPTURE,
        ),
    ),
    settings=RunSettings(
        server_urls=(),
        capture_urls=(),
        concurrency={},
        max_input_tokens=2042,
        states=StatesMode.REPLAY,
        capture=CAPTURE,
    ),
    output_dir="/out",
)


class Far:
    """A server with a key, and the spool of a lane on another node."""

    def __init__(self, url, theirs, ours):
        self.url, self.theirs = url, theirs
        self.ours = Spool(ours, "far-away", 1 << 30)

    def run(self, scene):
        async def play():
            async with SGLangClient(KEY) as client:
                facts = await client.facts(self.url)
                decoders = DecodePool(self.ours, processes=1)
                context = Context(
                    client=client,
                    spool=self.ours,
                    decoders=decoders,
                    view=VIEW,
                    facts={self.url: facts},
                    passing=Passing(),
                )
                try:
                    return await scene(context)
                finally:
                    await decoders.close()

        return asyncio.run(play())

    def files(self):
        return [sorted(path.name for path in folder.iterdir()) for folder in (self.theirs, self.ours.folder)]

    def rows(self, ref):
        rows = np.concatenate([block.copy() for block in self.ours.blocks(ref)])
        self.ours.delete(ref)
        return rows


class Answer:
    """What `worst_cosine` reads: tokens that have rows."""

    def __init__(self, ran):
        self.ran = ran


@pytest.fixture(scope="module")
def far(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("far")
    with serve(environment, folder, *AUX, "--chunked-prefill-size", "64", "--api-key", KEY) as server:
        yield Far(server.url, folder / "spool", folder / "ours")


def test_a_lane_of_another_node_has_all_rows_and_no_file_stays_with_the_server(far, environment, tmp_path):
    sent = prompts(12, 20, 300, seed=8)

    async def scene(context):
        facts = context.facts[far.url]
        assert facts.plugin.node == NODE
        await probe_spool(context.client, far.url, facts, CAPTURE, far.ours, context.passing)
        return await asyncio.gather(
            *(
                ask_with_states(
                    capture_body(as_tokens(prompt)),
                    far.url,
                    context,
                    prompt_id=secrets.token_bytes(16),
                    capture=CAPTURE,
                    deadline_s=100,
                    max_new_tokens=1,
                )
                for prompt in sent
            )
        )

    answers = far.run(scene)
    refs = [states.ref for _, states in answers]
    assert {ref.node for ref in refs} == {"far-away"}
    assert far.files() == [[], sorted(ref.name for ref in refs)]
    rows = [far.rows(ref) for ref in refs]
    assert worst_cosine([Answer(prompt) for prompt in sent], rows, EAGLE3, environment, tmp_path) > CLOSE


def test_the_route_asks_for_the_key_and_says_what_is_not_there(far):
    name = secrets.token_hex(12) + FETCHED
    with httpx.Client(base_url=far.url, timeout=60) as client:
        known = {"Authorization": f"Bearer {KEY}"}
        reply = client.post("/generate", json=body([11, 12, 13], eyas={"name": name}), headers=known).json()
        said = reply["meta_info"]["eyas_states"]
        for method in ("GET", "DELETE"):
            assert client.request(method, PATH + name).status_code == 401
            wrong = {"Authorization": "Bearer no"}
            assert client.request(method, PATH + name, headers=wrong).status_code == 401
        assert client.get(PATH + "none", headers=known).status_code == 410
        assert client.get(PATH + "..%2Flog", headers=known).status_code in (404, 410)
        got = client.get(PATH + name, headers=known)
        assert got.content == (far.theirs / name).read_bytes()
        ref = SpoolRef(node=said["node"], name=name, shape=tuple(said["shape"]), crc32=said["crc32"])
        (block,) = Spool(far.theirs, NODE, 1 << 30).blocks(ref)
        assert np.isfinite(as_floats(block)).all()
        assert client.delete(PATH + name, headers=known).status_code == 204
        assert client.get(PATH + name, headers=known).status_code == 410
    assert far.files() == [[], []]


def test_a_file_that_is_written_for_a_client_that_left_goes_by_itself(far):
    name = secrets.token_hex(12) + FETCHED
    known = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=far.url, timeout=60, headers=known) as client:
        client.delete(PATH + name)
        client.post("/generate", json=body([11, 12, 13], eyas={"name": name}))
        while client.get(PATH + name).status_code == 200:  # until the sweep; else pytest's time limit
            pass
    assert far.files() == [[], []]
