"""What ids of auxiliary layers mean, asked of the model classes of the installed SGLang."""

import json
import os
import subprocess

import pytest

from tests.sglang.environment.build import Environment
from workers.sglang.layer_ids import default_layers, layers_of

pytestmark = pytest.mark.sglang
BLOCKS = 24
LISTS = ([1, 11, 20], [2, 12, 21], [0, 3], [1], [2], [20, 11, 2], [2, 12, 24])
ASK = """
import json, sys
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_parallel

class Standin:
    # for a loaded model: every attribute is there, and what is written stays
    def __init__(self, blocks): self.__dict__["blocks"] = blocks
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        if name == "num_hidden_layers": return self.blocks
        made = self.__dict__[name] = Standin(self.blocks)
        return made
    def __iter__(self): return iter(())
    def __len__(self): return 0
    def __bool__(self): return True
    def __getitem__(self, index): return Standin(self.blocks)
    def __call__(self, *given): self.__dict__["given"] = given

def captured(model):
    # the innermost list that was set, or passed on to the model's own function
    for name, value in vars(model).items():
        if name == "layers_to_capture": return value
        if name == "set_eagle3_layers_to_capture" and "given" in vars(value): return value.given[0]
    for value in vars(model).values():
        if isinstance(value, Standin) and (found := captured(value)) is not None: return found

blocks, lists, inner, drafts = json.load(sys.stdin)
drafts = tuple(drafts)
said = {}
for architecture, of in ModelRegistry.models.items():
    if not hasattr(of, "set_eagle3_layers_to_capture") or architecture.endswith(drafts): continue
    # one that only passes the list on is read as the model inside it
    of = ModelRegistry.models.get(inner.get(architecture), of)
    said[architecture] = []
    for ids in lists:
        model = Standin(blocks)
        with get_parallel().override(pp_group=Standin(blocks)):
            of.set_eagle3_layers_to_capture(model, ids)
        said[architecture].append(captured(model))
print(json.dumps(said))
"""
DRAFTS = ("NextN", "MTP", "Eagle", "Eagle3", "AssistantForCausalLM")
"""How names of drafts end, which are nobody's target."""
INSIDE = {
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
}


def test_every_model_that_gives_auxiliary_layers_reads_ids_as_is_believed_of_it(
    environment: Environment,
) -> None:
    lists = [*LISTS, None]
    answer = subprocess.run(
        [str(environment.python), "-c", ASK],
        env={"PATH": os.environ["PATH"], "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "none"},
        input=json.dumps([BLOCKS, lists, INSIDE, DRAFTS]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    said = json.loads(answer.stdout.splitlines()[-1])
    assert len(said) > 40
    assert {"LlamaForCausalLM", "GptOssForCausalLM", *INSIDE} <= set(said)
    del said["MindSporeForCausalLM"]  # hands the list to a model that SGLang does not have
    wrong = []
    for architecture, captured in said.items():
        for ids, layers in zip(lists, captured, strict=True):
            believed = (
                default_layers(architecture, BLOCKS) if ids is None else layers_of(ids, architecture, BLOCKS)
            )
            if layers is None or tuple(sorted(set(layers))) != believed:
                wrong.append(f"{architecture} {ids}: {layers}, believed {believed}")
    assert not wrong, "\n".join(wrong)
