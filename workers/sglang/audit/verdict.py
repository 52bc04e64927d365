"""What the figures of a check mean: limits, each with its reason, and alarms. Pure.

How the figures come about is in `measuring.py` and `output_head.py`.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from storage.sample import Alarm, Check
from workers.sglang.audit.measuring import LARGEST, Measured

ROW_ERROR = 0.5
"""‖a − b‖ ÷ ‖a‖ of one row. Two captures of a row differ by roundings, and these by what else was in the
batch: by 0.013 at most on a real SGLang over 8 layers, decoded or prefilled, alone or together; by several
times that in a deep model, or where a router sends a token to another expert. The row of another request
differs by 1.4, as two directions do that have nothing in common; the next token's by 0.6 to 1.1."""
TYPICAL_ERROR = 0.1
"""The same, median over a layer's rows: 0.008 there. A few rows may be unlucky, never half of them; states of
the layer before or after, or from before the norm instead of behind it, differ in all."""
RMS_ERROR = 0.05
"""How far the root mean square of final state ÷ norm weight may be from 1. The norm makes it 1 but for
its epsilon; bf16 rounds each value by at most 0.4 %, and a row's average by far less."""
HEAD_ERROR = 0.3
"""Nats, mean over a sample's last tokens: 0.004 on a real SGLang. A server rounds its logits to bf16, by 0.06
at most where they are below 32; rows that are another token's are wrong by whole nats."""
GUESS_MARGIN = 0.5
"""Nats by which a response may be less likely than a guess among all tokens. What a model has sampled is more
likely on average, and so is given text of any kind to a model that has learnt; ids of another tokenizer
are not."""
FEWEST_POSITIONS = 16
"""Fewer tokens than that tell nothing on average."""

ANOTHER_BATCH = (
    "what this server captures depends on what else it does; start it as `ops/sglang/` shows "
    "(`--disable-overlap-schedule --disable-cuda-graph --disable-radix-cache`) and do not train on what "
    "it gave before"
)


def judged(
    server: str,
    *,
    hs_indices: Sequence[int],
    measured: Measured | None,
    server_logprobs: NDArray[np.float64] | None,
    answered: int,
    own_logprobs: NDArray[np.float64] | None,
    vocab_size: int,
    skipped: Sequence[str],
) -> Check:
    """The check with its alarms; figures that are None were not to be had.

    Log-probabilities are of the sample's last tokens, [k], and of the same ones; the last `answered`
    of them are the response's, generated or given.
    """
    alarms: list[Alarm] = []
    figures: dict[str, float | None] = {}
    rows = positions = 0
    if measured is not None and measured.errors.size:
        rows = len(measured.errors)
        medians = np.median(measured.errors, axis=0)
        figures |= {
            "worst_error": float(measured.errors.max()),
            "typical_error": float(medians.max()),
            "worst_cosine": float(measured.cosines.min()),
        }
        alarms += _of_rows(measured.errors, medians, hs_indices)
        if measured.rms is not None:
            row = int(np.abs(measured.rms - 1).argmax())
            figures["rms"] = float(measured.rms[row])
            alarms += _of_rms(float(measured.rms[row]), row)
    if server_logprobs is not None and len(server_logprobs):
        positions = len(server_logprobs)
        answer = server_logprobs[max(0, positions - answered) :]
        if len(answer):
            figures["mean_logprob"] = float(answer.mean())
            alarms += _of_guessing(float(answer.mean()), len(answer), vocab_size)
        if own_logprobs is not None:
            error = float(np.abs(own_logprobs - server_logprobs).mean())
            error = min(error, LARGEST) if math.isfinite(error) else LARGEST
            figures["head_error"] = error
            alarms += _of_head(error, positions)
    return Check(
        server=server, rows=rows, positions=positions, skipped=tuple(skipped), alarms=tuple(alarms), **figures
    )


def _of_rows(
    errors: NDArray[np.float32], medians: NDArray[np.float32], hs_indices: Sequence[int]
) -> Iterator[Alarm]:
    layer = int(medians.argmax())
    if medians[layer] > TYPICAL_ERROR:
        yield Alarm(
            code="states.differ",
            value=float(medians[layer]),
            limit=TYPICAL_ERROR,
            message=f"median over hidden state {hs_indices[layer]}, captured twice: {ANOTHER_BATCH}",
        )
    elif errors.max() > ROW_ERROR:
        row, layer = (int(at) for at in np.unravel_index(errors.argmax(), errors.shape))
        wrong = int((errors.max(axis=1) > ROW_ERROR).sum())
        yield Alarm(
            code="states.row",
            value=float(errors[row, layer]),
            limit=ROW_ERROR,
            message=f"row {row} of hidden state {hs_indices[layer]}, one of {wrong} such of {len(errors)}, "
            f"captured twice: {ANOTHER_BATCH}",
        )


def _of_rms(rms: float, row: int) -> Iterator[Alarm]:
    if abs(rms - 1) > RMS_ERROR:
        yield Alarm(
            code="states.norm",
            value=abs(rms - 1),
            limit=RMS_ERROR,
            message=f"row {row}: final state ÷ norm weight has a root mean square of {rms:.3g}, not 1: it is "
            "not what the final norm gives, or another model's; do not train on this server's final states",
        )


def _of_head(error: float, positions: int) -> Iterator[Alarm]:
    if positions >= FEWEST_POSITIONS and error > HEAD_ERROR:
        yield Alarm(
            code="head.differs",
            value=error,
            limit=HEAD_ERROR,
            message=f"over {positions} tokens the output head gives other log-probabilities from the final "
            "states than the server says: rows are shifted, before the norm, or another model's; compare "
            "`--model` with what the server loaded and do not train on its final states",
        )


def _of_guessing(mean: float, positions: int, vocab_size: int) -> Iterator[Alarm]:
    limit = -math.log(vocab_size) - GUESS_MARGIN
    if positions >= FEWEST_POSITIONS and mean < limit:
        yield Alarm(
            code="tokens.unlikely",
            value=mean,
            limit=limit,
            message=f"mean log-probability of the response's last {positions} tokens, less than a guess has: "
            "they are likely ids of another tokenizer; look at the dataset's rows and at `--model`",
        )
