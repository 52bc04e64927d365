"""The requests that were sent to a real SGLang, and are sent to the engine, to compare the answers.

`record_replies.py` sends them to a real server; `test_recorded.py` to the engine.
"""

import json
from dataclasses import dataclass, field
from typing import Any

CONTEXT = 2048
"""Context length of the recorded server, in tokens."""
PROMPT = [102, 692, 1308, 1950, 625]
"""One of the golden file's: every greedy token after it wins clearly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request."""

    name: str
    path: str = "/generate"
    method: str = "POST"
    body: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    """Sent instead of `body`."""

    @property
    def content(self) -> bytes | None:
        """What is sent."""
        if self.method == "GET":
            return None
        return (self.raw if self.raw is not None else json.dumps(self.body)).encode()


def generate(name: str, ids: Any = PROMPT, *, top: dict[str, Any] | None = None, **sampling: Any) -> Case:
    """A greedy request that goes on past end-of-sequence tokens unless told otherwise."""
    params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True, **sampling}
    return Case(name=name, body={"input_ids": ids, "sampling_params": params, **(top or {})})


def states(name: str, ids: list[int] = PROMPT, **sampling: Any) -> Case:
    """A greedy request for hidden states, out of the prefix cache's reach."""
    return generate(name, ids, top={"return_hidden_states": True, "extra_key": name}, **sampling)


def long(count: int) -> list[int]:
    """`count` ids that repeat nothing the other cases sent."""
    return [7 + (index * 37) % 1900 for index in range(count)]


CASES = (
    generate("greedy", max_new_tokens=24),
    generate("one token", [796], max_new_tokens=3),
    generate("named", top={"rid": "00000000000000000000000000000001"}),
    generate("zero tokens", max_new_tokens=0),
    generate("unknown top-level key", top={"no_such_key": 1}),
    generate("custom params", custom_params={"eyas": {"states": "spool", "name": "x"}}),
    generate("seeded", temperature=1.0, sampling_seed=5),
    generate("top k and top p", temperature=0.7, top_k=20, top_p=0.9, sampling_seed=5),
    generate("defaults", temperature=None, top_p=None, top_k=None),
    generate("stop token", max_new_tokens=24, ignore_eos=False, stop_token_ids=[1897]),
    generate(
        "stop token kept in the text",
        max_new_tokens=24,
        ignore_eos=False,
        no_stop_trim=True,
        stop_token_ids=[1897],
    ),
    generate("stop token ignored", max_new_tokens=9, stop_token_ids=[1897]),
    generate("special tokens shown", [*PROMPT, 2, 5], skip_special_tokens=False),
    generate("least tokens", max_new_tokens=24, min_new_tokens=9, ignore_eos=False, stop_token_ids=[1897]),
    generate("clamped length", long(CONTEXT - 16), max_new_tokens=16),
    generate("longest input", long(CONTEXT - 7), max_new_tokens=1),
    states("states of a generation"),
    states("states of a capture", max_new_tokens=1),
    states("states of no token", max_new_tokens=0),
    Case(
        name="text",
        body={"text": "A list of numbers", "sampling_params": {"max_new_tokens": 2, "temperature": 0}},
    ),
    generate("input as long as the context", long(CONTEXT)),
    generate("input too long", long(CONTEXT - 6), max_new_tokens=1),
    generate("total too long", long(100), max_new_tokens=CONTEXT),
    generate("empty ids", []),
    generate("ids not a list", "abc"),
    generate("ids of text", ["a", "b"]),
    generate("ids of floats", [1.5, 2.5]),
    generate("unknown sampling key", no_such_key=1),
    generate("negative temperature", temperature=-1),
    generate("top p above one", top_p=2),
    generate("top k zero", top_k=0),
    generate("negative max_new_tokens", max_new_tokens=-1),
    generate("max_new_tokens of text", max_new_tokens="many"),
    generate("temperature of text", temperature="hot"),
    generate("seed of text", sampling_seed="x"),
    generate("sampling_params not an object", top={"sampling_params": [1]}),
    generate("rid not text", top={"rid": 5}),
    generate("stream of text", top={"stream": "maybe"}),
    Case(name="no input", body={"sampling_params": {"max_new_tokens": 1}}),
    Case(
        name="text and ids", body={"text": "a", "input_ids": [300], "sampling_params": {"max_new_tokens": 1}}
    ),
    Case(name="not JSON", raw='{"input_ids": [1'),
    Case(name="not an object", raw="[1]"),
    Case(name="no body", raw=""),
    generate("stream", top={"stream": True}, max_new_tokens=3),
    Case(name="server info", path="/server_info", method="GET"),
    Case(name="older server info", path="/get_server_info", method="GET"),
    Case(name="model info", path="/model_info", method="GET"),
    Case(name="older model info", path="/get_model_info", method="GET"),
    Case(name="models", path="/v1/models", method="GET"),
    Case(name="loads", path="/v1/loads", method="GET"),
    Case(name="ready", path="/ready", method="GET"),
    Case(name="health", path="/health", method="GET"),
    Case(name="health by a token", path="/health_generate", method="GET"),
    Case(name="no such page", path="/no_such_page", method="GET"),
    Case(name="generate by GET", method="GET"),
)
