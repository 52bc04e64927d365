"""The output head out of a checkpoint: against a plain softmax, and against what transformers computed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from workers.engine import tiny_model_dir
from workers.engine.safetensors_file import write_tensors
from workers.sglang.audit.checkpoint import CheckpointError, as_floats
from workers.sglang.audit.output_head import find_head

VOCAB, HIDDEN = 53, 16
RNG = np.random.default_rng(1)
HEAD = RNG.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
NORM = RNG.uniform(0.5, 2, HIDDEN).astype(np.float32)
FINAL = RNG.normal(size=(7, HIDDEN)).astype(np.float32)
TOKENS = RNG.integers(0, VOCAB, 7).astype(np.int32)
GOLDEN = Path(__file__).parents[1] / "engine" / "golden.npz"


def checkpoint(folder: Path, tensors: dict[str, NDArray[np.float32]], **config: object) -> str:
    """A folder with these tensors as float32."""
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def softmax_logprobs(head: NDArray[np.float32]) -> NDArray[np.float64]:
    """By the definition, all of the vocabulary at once."""
    logits = FINAL.astype(np.float64) @ head.astype(np.float64).T
    exponentials = np.exp(logits)
    return np.log(exponentials[np.arange(len(TOKENS)), TOKENS] / exponentials.sum(axis=1))


@pytest.mark.parametrize("block_bytes", [1, 5 * 4 * HIDDEN, 1 << 20])
def test_log_probabilities_are_those_of_the_whole_softmax_in_blocks_of_any_size(
    tmp_path: Path, block_bytes: int
) -> None:
    model = checkpoint(tmp_path, {"lm_head.weight": HEAD, "model.norm.weight": NORM})
    head = find_head(model)
    found = head.logprobs(FINAL, TOKENS, block_bytes)
    np.testing.assert_allclose(found, softmax_logprobs(HEAD), atol=1e-5)
    np.testing.assert_array_equal(head.norm, NORM)


def test_logits_too_large_for_an_exponential_are_no_trouble(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, {"lm_head.weight": HEAD * 1e4, "model.norm.weight": NORM})
    logits = FINAL.astype(np.float64) @ (HEAD * 1e4).astype(np.float64).T
    # of values so far apart the greatest is the sum
    expected = logits[np.arange(len(TOKENS)), TOKENS] - logits.max(axis=1)
    np.testing.assert_allclose(find_head(model).logprobs(FINAL, TOKENS, 64), expected, rtol=1e-5, atol=1.0)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_precision_is_read_as_it_is_stored(tmp_path: Path, dtype: str) -> None:
    if dtype == "bf16":
        bits = {
            "lm_head.weight": (HEAD.view(np.uint32) >> 16).astype(np.uint16),
            "model.norm.weight": (NORM.view(np.uint32) >> 16).astype(np.uint16),
        }
        write_tensors(tmp_path / "model.safetensors", bits)
        (tmp_path / "config.json").write_text("{}")
        model, stored = str(tmp_path), as_floats(bits["lm_head.weight"])
        assert np.abs(stored - HEAD).max() < 0.02
    else:
        halves = {"lm_head.weight": HEAD.astype(np.float16), "model.norm.weight": NORM.astype(np.float16)}
        model, stored = checkpoint(tmp_path, halves), HEAD.astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(find_head(model).logprobs(FINAL, TOKENS), softmax_logprobs(stored), atol=1e-5)


def test_the_text_part_of_a_sharded_multimodal_checkpoint_is_found(tmp_path: Path) -> None:
    names = {"language_model.lm_head.weight": HEAD, "language_model.model.norm.weight": NORM}
    others = {"vision_tower.norm.weight": NORM * 3}
    for number, (name, tensor) in enumerate((names | others).items()):
        safetensors.numpy.save_file({name: tensor}, tmp_path / f"model-{number}.safetensors")
    index = {name: f"model-{number}.safetensors" for number, name in enumerate(names | others)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {"model_type": "kimi_k25", "text_config": {"vocab_size": VOCAB, "tie_word_embeddings": False}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = find_head(str(tmp_path))
    np.testing.assert_allclose(head.logprobs(FINAL, TOKENS), softmax_logprobs(HEAD), atol=1e-5)
    np.testing.assert_array_equal(head.norm, NORM)


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {}])
def test_a_tied_head_is_the_embedding(tmp_path: Path, config: dict[str, object]) -> None:
    model = checkpoint(tmp_path, {"model.embed_tokens.weight": HEAD, "model.norm.weight": NORM}, **config)
    np.testing.assert_allclose(find_head(model).logprobs(FINAL, TOKENS), softmax_logprobs(HEAD), atol=1e-5)


def test_rows_that_pad_the_vocabulary_are_no_tokens(tmp_path: Path) -> None:
    padded = np.concatenate([HEAD, np.full((11, HIDDEN), 9, np.float32)])
    tensors = {"lm_head.weight": padded, "model.norm.weight": NORM}
    head = find_head(checkpoint(tmp_path, tensors, vocab_size=VOCAB))
    np.testing.assert_allclose(head.logprobs(FINAL, TOKENS), softmax_logprobs(HEAD), atol=1e-5)


def test_a_norm_stored_as_an_offset_multiplies_by_one_more(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": HEAD, "model.norm.weight": NORM}
    head = find_head(checkpoint(tmp_path, tensors, model_type="gemma3_text"))
    np.testing.assert_allclose(head.norm, NORM + 1)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"final_logit_softcapping": 30.0}, "softcapping"),
        ({"tie_word_embeddings": False, "without": "lm_head.weight"}, "lm_head.weight"),
        ({"without": "model.norm.weight"}, "norm.weight"),
        ({"quantized": True}, "I32"),
    ],
)
def test_what_cannot_be_computed_with_is_left_alone_and_named(
    tmp_path: Path, spoil: dict[str, object], why: str
) -> None:
    tensors: dict[str, NDArray[np.float32]] = {"lm_head.weight": HEAD, "model.norm.weight": NORM}
    tensors.pop(str(spoil.pop("without", "")), None)
    if spoil.pop("quantized", False):
        tensors["lm_head.weight"] = HEAD.view(np.int32)  # type: ignore[assignment]
    model = checkpoint(tmp_path, tensors, **spoil)
    with pytest.raises(CheckpointError, match=why):
        find_head(model)


def test_a_model_that_is_not_on_this_machine_is_not_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "here", {"lm_head.weight": HEAD, "model.norm.weight": NORM})
    for model in ("here", "no-such/model", str(tmp_path / "gone"), "not a name"):
        with pytest.raises(CheckpointError, match="not"):
            find_head(model)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="safetensors"):
        find_head(str(empty))


def test_a_hub_id_is_found_in_this_machines_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--model"
    commit = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    checkpoint(repository / "snapshots" / commit, {"lm_head.weight": HEAD, "model.norm.weight": NORM})
    script = (
        "from workers.sglang.audit.output_head import find_head; print(*find_head('org/model').weight.shape)"
    )
    environ = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    said = subprocess.run(
        [sys.executable, "-c", script], env=environ, check=True, capture_output=True, text=True
    )
    assert said.stdout.split() == [str(VOCAB), str(HIDDEN)]


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", (4).to_bytes(8, "little") + b"null"],
)
def test_a_damaged_file_is_a_reason_and_no_crash(tmp_path: Path, damaged: bytes) -> None:
    model = checkpoint(tmp_path, {"lm_head.weight": HEAD, "model.norm.weight": NORM})
    (tmp_path / "model.safetensors").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_head(model)


def test_what_transformers_chose_is_likeliest_by_the_head_and_its_states() -> None:
    golden, head = np.load(GOLDEN), find_head(str(tiny_model_dir()))
    for name in golden.files:
        if not name.startswith("ids_"):
            continue
        ids = golden[name]
        length = int(name.removeprefix("ids_"))
        final = as_floats(golden[f"states_{length}"][-1])[length - 1 :]
        generated = ids[length:].astype(np.int32)
        chosen = head.logprobs(final, generated)
        for other in (generated + 1) % head.vocab_size, (generated + 500) % head.vocab_size:
            assert (chosen > head.logprobs(final, other)).all()
