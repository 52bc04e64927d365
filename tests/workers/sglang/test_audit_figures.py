"""What a second capture shows: real states of the tiny model, spoiled in every way that costs a training."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from storage.sample import Check
from storage.spool import Spool, spool_name
from workers.engine import tiny_model_dir
from workers.engine.llama import Llama
from workers.sglang.audit.checkpoint import as_floats
from workers.sglang.audit.measuring import Measured, measure
from workers.sglang.audit.output_head import OutputHead, find_head
from workers.sglang.audit.verdict import judged

Bits = NDArray[np.uint16]
INDICES = (2, 4, 5, 8)
GOLDEN = Path(__file__).parents[1] / "engine" / "golden.npz"
TOKENS = np.load(GOLDEN)["ids_130"].astype(np.int32)
"""130 tokens of a prompt and 24 that transformers generated."""
TAIL = 24


@pytest.fixture(scope="module")
def states() -> Bits:
    """[T, 4, H] of the tokens."""
    *_, bits = Llama(tiny_model_dir()).prefill(TOKENS.astype(np.int64), INDICES)
    assert bits is not None
    return bits


@pytest.fixture(scope="module")
def others() -> Bits:
    """Of as many other tokens."""
    *_, bits = Llama(tiny_model_dir()).prefill((TOKENS[::-1] * 7 % 1990 + 6).astype(np.int64), INDICES)
    assert bits is not None
    return bits


@pytest.fixture(scope="module")
def head() -> OutputHead:
    return find_head(str(tiny_model_dir()))


def to_bits(values: NDArray[np.float32]) -> Bits:
    """The nearest bf16, as a model's own rounding."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def measured(folder: Path, first: Bits, second: Bits, head: OutputHead | None = None) -> Measured:
    spool = Spool(folder, "here", 1 << 30)
    refs = [spool.write(spool_name(bytes(16)), bits) for bits in (first, second)]
    last = len(TOKENS) - 1
    return measure(
        spool,
        *refs,
        final=None if head is None else 3,
        norm=None if head is None else head.norm,
        tail=slice(last - TAIL, last),
    )


def check(
    folder: Path,
    first: Bits,
    second: Bits,
    head: OutputHead | None = None,
    server_logprobs: NDArray[np.float64] | None = None,
) -> Check:
    found = measured(folder, first, second, head)
    own = None
    if head is not None and found.tail is not None and server_logprobs is not None:
        own = head.logprobs(found.tail, TOKENS[-TAIL:])
    return judged(
        "http://server",
        hs_indices=INDICES,
        measured=found,
        server_logprobs=server_logprobs,
        answered=TAIL,
        own_logprobs=own,
        vocab_size=2000,
        skipped=(),
    )


def codes(found: Check) -> set[str]:
    return {alarm.code for alarm in found.alarms}


def true_logprobs(states: Bits, head: OutputHead) -> NDArray[np.float64]:
    """By the definition, with logits rounded to bf16 as a server has them."""
    final = as_floats(states[-TAIL - 1 : -1, 3]).astype(np.float64)
    weight = head.weight.rows(0, head.vocab_size).astype(np.float64)
    logits = as_floats(to_bits((final @ weight.T).astype(np.float32))).astype(np.float64)
    total = np.log(np.exp(logits).sum(axis=1))
    found: NDArray[np.float64] = logits[np.arange(TAIL), TOKENS[-TAIL:]] - total
    return found


def test_errors_and_cosines_are_those_of_the_definition(tmp_path: Path, states: Bits, others: Bits) -> None:
    found = measured(tmp_path, states, others)
    a, b = as_floats(states).astype(np.float64), as_floats(others).astype(np.float64)
    size = np.linalg.norm(a, axis=-1)
    np.testing.assert_allclose(found.errors, np.linalg.norm(a - b, axis=-1) / size, rtol=1e-4)
    cosines = (a * b).sum(axis=-1) / size / np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(found.cosines, cosines, atol=1e-5)


def test_a_sample_larger_than_a_block_is_compared_to_its_last_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shape = (3000, 2, 512)  # 6 MB: two blocks
    first = to_bits(rng.normal(size=shape).astype(np.float32))
    second = first.copy()
    second[-1, 1] ^= 0x8000
    found = measured(tmp_path, first, second)
    assert len(found.errors) == 3000
    assert np.flatnonzero(found.errors.max(axis=1)).tolist() == [2999]
    assert found.errors[-1, 1] == pytest.approx(2.0)
    assert found.cosines[-1, 1] == pytest.approx(-1.0)


def test_of_a_response_captured_while_it_was_generated_all_rows_but_the_last_are_compared(
    tmp_path: Path, states: Bits, head: OutputHead
) -> None:
    found = check(tmp_path, states[:-1], states, head, true_logprobs(states, head))
    assert found.rows == len(TOKENS) - 1
    assert found.head_error is not None
    assert found.alarms == ()


def test_a_good_sample_raises_no_alarm(tmp_path: Path, states: Bits, head: OutputHead) -> None:
    found = check(tmp_path, states, states, head, true_logprobs(states, head))
    assert found.alarms == ()
    assert (found.rows, found.worst_error, found.positions) == (len(TOKENS), 0.0, TAIL)
    assert found.rms == pytest.approx(1, abs=0.01)
    assert found.head_error is not None
    assert found.head_error < 0.05


def test_another_implementation_of_the_same_model_raises_no_alarm(
    tmp_path: Path, states: Bits, head: OutputHead
) -> None:
    golden = np.load(GOLDEN)["states_130"][list(INDICES)].transpose(1, 0, 2)
    theirs = np.concatenate([golden, states[-1:]])
    found = check(tmp_path, states, np.ascontiguousarray(theirs), head, true_logprobs(states, head))
    assert found.alarms == ()
    assert found.worst_error is not None
    assert 0 < found.worst_error < 0.1


def test_one_row_of_another_request_among_a_hundred_is_found_and_named(
    tmp_path: Path, states: Bits, others: Bits
) -> None:
    for row in (0, 77, len(states) - 1):
        wrong = states.copy()
        wrong[row] = others[row]
        (alarm,) = check(tmp_path, wrong, states).alarms
        assert alarm.code == "states.row"
        assert alarm.value > alarm.limit
        assert f"row {row} " in alarm.message


def test_one_row_of_the_next_token_in_one_layer_is_found(tmp_path: Path, states: Bits) -> None:
    for layer in range(len(INDICES)):
        wrong = states.copy()
        wrong[40, layer] = states[41, layer]
        (alarm,) = check(tmp_path, wrong, states).alarms
        assert alarm.code == "states.row"
        assert f"row 40 of hidden state {INDICES[layer]}," in alarm.message


@pytest.mark.parametrize("by", [1, -1])
def test_rows_shifted_by_one_are_found(tmp_path: Path, states: Bits, by: int) -> None:
    found = check(tmp_path, np.roll(states, by, axis=0), states)
    assert codes(found) == {"states.differ"}


def test_another_requests_rows_are_found(tmp_path: Path, states: Bits, others: Bits) -> None:
    assert codes(check(tmp_path, others, states)) == {"states.differ"}


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 0, 2, 3), (3, 0, 1, 2)])
def test_layers_in_other_places_are_found(tmp_path: Path, states: Bits, order: Sequence[int]) -> None:
    wrong = np.ascontiguousarray(states[:, order])
    assert codes(check(tmp_path, wrong, states)) == {"states.differ"}


def before_the_norm(states: Bits, head: OutputHead, size: float) -> Bits:
    """States whose final ones have not passed the norm: of such a root mean square they were."""
    wrong = states.copy()
    wrong[:, 3] = to_bits(as_floats(states[:, 3]) / head.norm * np.float32(size))
    return wrong


@pytest.mark.parametrize("size", [0.2, 0.9, 1.1, 30.0])
def test_a_final_state_before_the_norm_is_found_also_when_both_captures_have_it(
    tmp_path: Path, states: Bits, head: OutputHead, size: float
) -> None:
    wrong = before_the_norm(states, head, size)
    # ÷ the weight once more: what the definition says
    normed = as_floats(wrong[:, 3]).astype(np.float64) / head.norm
    rms = np.sqrt((normed**2).mean(axis=1))
    found = check(tmp_path, wrong, wrong, head)
    assert codes(found) == {"states.norm"}
    assert found.rms == pytest.approx(rms[np.abs(rms - 1).argmax()], rel=1e-4)


def test_a_server_whose_rows_are_all_one_late_is_found_by_the_output_head(
    tmp_path: Path, states: Bits, head: OutputHead
) -> None:
    late = np.roll(states, 1, axis=0)
    found = check(tmp_path, late, late, head, true_logprobs(states, head))
    assert codes(found) == {"head.differs"}


def test_final_states_that_are_another_layers_are_found_by_the_output_head(
    tmp_path: Path, states: Bits, head: OutputHead
) -> None:
    wrong = states.copy()
    wrong[:, 3] = states[:, 2]
    assert codes(check(tmp_path, wrong, wrong, head, true_logprobs(states, head))) == {
        "head.differs",
        "states.norm",
    }


def judged_tokens(logprobs: NDArray[np.float64], vocab_size: int, answered: int = 1000) -> Check:
    return judged(
        "http://server",
        hs_indices=INDICES,
        measured=None,
        server_logprobs=logprobs,
        answered=answered,
        own_logprobs=None,
        vocab_size=vocab_size,
        skipped=("second capture: server.busy",),
    )


def test_given_tokens_less_likely_than_a_guess_are_another_tokenizers() -> None:
    guess = -math.log(1000)
    found = judged_tokens(np.full(40, guess - 0.6), 1000)
    (alarm,) = found.alarms
    assert (alarm.code, alarm.value) == ("tokens.unlikely", pytest.approx(guess - 0.6))
    assert found.mean_logprob == pytest.approx(guess - 0.6)
    assert judged_tokens(np.full(40, guess - 0.4), 1000).alarms == ()
    assert judged_tokens(np.full(15, guess - 9), 1000).alarms == (), "a few tokens tell nothing"


def test_only_the_response_is_held_to_be_likely() -> None:
    """A prompt may be anything: a list of names, another language's text, noise."""
    logprobs = np.concatenate([np.full(20, -30.0), np.full(44, -1.5)])
    found = judged_tokens(logprobs, 1000, answered=44)
    assert (found.positions, found.mean_logprob, found.alarms) == (64, -1.5, ())
    assert judged_tokens(logprobs, 1000, answered=0).mean_logprob is None


def test_nothing_measured_is_no_alarm_and_says_why() -> None:
    found = judged_tokens(np.full(40, -1.0), 1000)
    assert (found.rows, found.worst_error, found.alarms) == (0, None, ())
    assert found.skipped == ("second capture: server.busy",)


def test_values_that_are_no_numbers_are_an_alarm_and_not_an_error(tmp_path: Path, states: Bits) -> None:
    wrong = states.copy()
    wrong[3, 1] = 0x7FC0
    found = check(tmp_path, wrong, states)
    assert codes(found) == {"states.row"}
    assert found.worst_cosine == -1.0
