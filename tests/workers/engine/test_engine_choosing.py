"""How tokens are picked and where responses end."""

import numpy as np
import pytest

from workers.engine.order import Sampling
from workers.engine.sampler import pick, uniform
from workers.engine.stopping import stop_at


def draws(logits, sampling: Sampling, count: int = 4000) -> np.ndarray:
    rows = np.tile(np.array(logits, dtype=np.float64), (count, 1))
    return pick(rows, [sampling] * count, [11] * count, list(range(count)))


def test_sampling_follows_the_softmax():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    found = np.bincount(draws(np.log(probabilities), Sampling()), minlength=4) / 4000
    assert abs(found - probabilities).max() < 0.03


def test_a_low_temperature_sharpens():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    sharp = probabilities**2 / (probabilities**2).sum()
    found = np.bincount(draws(np.log(probabilities), Sampling(temperature=0.5)), minlength=4) / 4000
    assert abs(found - sharp).max() < 0.03


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.6), {0, 1}),
        (Sampling(top_p=0.4), {0}),
        (Sampling(top_k=3, top_p=0.99), {0, 1, 2}),
        (Sampling(temperature=0.0), {0}),
        (Sampling(top_k=1), {0}),
        (Sampling(top_k=99), {0, 1, 2, 3}),
    ],
)
def test_top_k_and_top_p_leave_out_the_unlikely(sampling, allowed):
    assert set(draws(np.log([0.5, 0.3, 0.15, 0.05]), sampling).tolist()) == allowed


def test_a_token_that_is_masked_is_never_picked():
    assert set(draws([-np.inf, 0.0, -np.inf, 0.0], Sampling()).tolist()) == {1, 3}


def test_a_pick_depends_on_seed_and_position_and_not_on_the_other_rows():
    logits = np.random.default_rng(0).normal(size=(6, 50))
    samplings = [Sampling(temperature=1.0, top_p=0.9)] * 6
    together = pick(logits.copy(), samplings, list(range(6)), [3] * 6)
    alone = [pick(logits[[row]], samplings[:1], [row], [3])[0] for row in range(6)]
    assert together.tolist() == alone
    assert len({uniform(seed, position) for seed in range(40) for position in range(40)}) == 1600


def test_responses_have_the_mean_length_asked_for():
    lengths = np.array([stop_at(np.array([seed, 5]), 64) for seed in range(20000)])
    assert 62 < lengths.mean() < 66
    assert lengths.min() == 2
    # geometric: the deviation is about the mean
    assert 58 < lengths.std() < 68


def test_a_prompt_always_ends_at_the_same_place():
    assert stop_at(np.array([1, 2, 3]), 64) == stop_at(np.array([1, 2, 3]), 64)
    assert stop_at(np.array([9]), 2) == 2
