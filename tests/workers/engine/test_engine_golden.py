"""The tiny model's numbers against those transformers computed (`make_golden.py`)."""

from pathlib import Path

import numpy as np
import pytest

from workers.engine import tiny_model_dir
from workers.engine.kvcache import Pools
from workers.engine.llama import Llama

GOLDEN = np.load(Path(__file__).parent / "golden.npz")
LENGTHS = sorted(int(name.removeprefix("ids_")) for name in GOLDEN.files if name.startswith("ids_"))


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(tiny_model_dir())


def as_floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_are_those_of_transformers(model, length):
    expected = GOLDEN[f"ids_{length}"].tolist()
    ids = expected[:length]
    last, keys, values, _ = model.prefill(np.array(ids))
    ids.append(int(model.logits(last[None]).argmax()))
    pools: Pools[None] = Pools(model.config)
    pools.add(None, keys, values)
    while len(ids) < len(expected):
        final, _ = model.decode(np.array(ids[-1:]), pools.in_use())
        ids.append(int(model.logits(final).argmax()))
    assert ids == expected


@pytest.mark.parametrize("length", LENGTHS)
def test_states_of_every_layer_point_where_those_of_transformers_do(model, length):
    ids = GOLDEN[f"ids_{length}"][:-1].astype(np.int64)
    expected = as_floats(GOLDEN[f"states_{length}"]).transpose(1, 0, 2)
    *_, bits = model.prefill(ids, range(model.config.num_layers + 1))
    states = as_floats(bits)
    cosines = (
        (states * expected).sum(-1) / np.linalg.norm(states, axis=-1) / np.linalg.norm(expected, axis=-1)
    )
    assert cosines.min() >= 0.999
    sizes = np.linalg.norm(states, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert abs(sizes - 1).max() <= 0.02


def test_the_first_token_has_the_very_bits_of_transformers(model):
    ids = GOLDEN["ids_1"][:1].astype(np.int64)
    *_, bits = model.prefill(ids, range(model.config.num_layers + 1))
    assert np.array_equal(bits[0], GOLDEN["states_1"][:, 0])


def test_the_final_state_has_passed_the_final_norm(model):
    ids = GOLDEN["ids_60"][:-1].astype(np.int64)
    *_, bits = model.prefill(ids, (model.config.num_layers,))
    unweighted = as_floats(bits)[:, 0] / model.final_norm
    assert abs(np.sqrt((unweighted**2).mean(-1)) - 1).max() < 0.01
