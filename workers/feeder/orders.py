"""What is to be done for one prompt: the message, its queue and about how big it is.

Reads nothing by itself; which prompts need what is decided in `feeder.py`.
"""

import numpy as np
from numpy.typing import NDArray

from storage.retries import last_number
from storage.run import RunSpec
from storage.sample import Failure, Finish, Prompt, Response, Stage
from storage.settings import RunSettings
from storage.tokens import response_digest
from workers.broker.messages import Capture, Failed, Generate, Message, Responded
from workers.broker.queues import Lane

AUTO = "auto"
AUTO_LONG_ABOVE = 4096
"""Prompt tokens above which `auto` means the lane `long`."""
MESSAGE_BYTES = 1500
"""Bytes of a message in Redis beside its tokens."""
TOKEN_BYTES = 4
"""Bytes a token takes in Redis: ids that are hard to compress, in base 64."""

PLACE = {lane: at for at, lane in enumerate(Lane)}
"""Lane → its number in arrays."""


def lane_of(dataset_lane: str, prompt_tokens: int) -> Lane:
    """The lane that generates for a prompt of a dataset with this lane."""
    if dataset_lane == AUTO:
        return Lane.LONG if prompt_tokens > AUTO_LONG_ABOVE else Lane.SHORT
    return Lane(dataset_lane)


def lanes_of(dataset_lane: str, prompt_tokens: NDArray[np.int32]) -> NDArray[np.uint8]:
    """The same for many prompts: per prompt, the lane's place in `Lane`."""
    if dataset_lane == AUTO:
        is_long = prompt_tokens > AUTO_LONG_ABOVE
        return np.where(is_long, PLACE[Lane.LONG], PLACE[Lane.SHORT]).astype(np.uint8)
    return np.full(len(prompt_tokens), PLACE[Lane(dataset_lane)], np.uint8)


def order_generate(
    run_id: str, spec: RunSpec, settings: RunSettings, dataset_lane: str, prompt: Prompt
) -> Message:
    """What gives the prompt its response.

    An order to a lane, whose output is capped so that prompt and response fit a request that
    captures them; or the result itself, where there is nothing to generate: a row that came with
    its tokens, or a prompt that leaves no room for a response.
    """
    lane = lane_of(dataset_lane, len(prompt.tokens))
    if lane is Lane.CAPTURE or prompt.given_from is not None:
        return Responded(run=run_id, response=given_response(prompt))
    most = spec.long_max_tokens if lane is Lane.LONG else spec.short_max_tokens
    room = settings.max_input_tokens - len(prompt.tokens) - 1
    if room < 1:
        said = f"prompt of `{len(prompt.tokens)}` tokens for servers that take `{settings.max_input_tokens}`"
        failure = Failure(
            id=prompt.id,
            digest=None,
            capture=None,
            dataset=prompt.dataset,
            stage=Stage.GENERATE,
            attempts=0,
            code="prompt.long",
            message=said,
            retry=last_number(settings.retries),
        )
        return Failed(run=run_id, failure=failure)
    return Generate(
        run=run_id,
        id=prompt.id,
        dataset=prompt.dataset,
        lane=lane,
        prompt=prompt.tokens,
        spans=prompt.spans,
        max_new_tokens=min(most, room),
        retry=last_number(settings.retries),
    )


def order_capture(run_id: str, capture: str, response: Response, retry: int = 0) -> Capture:
    """The order that gives a stored response its states."""
    return Capture(
        run=run_id,
        id=response.id,
        digest=response.digest,
        dataset=response.dataset,
        tokens=response.tokens,
        prompt_length=response.prompt_length,
        capture=capture,
        retry=retry,
    )


def given_response(prompt: Prompt) -> Response:
    """The response of a row that came with its tokens: nothing is generated."""
    return Response(
        id=prompt.id,
        digest=response_digest(prompt.tokens),
        dataset=prompt.dataset,
        tokens=prompt.tokens,
        prompt_length=prompt.given_from or 0,
        spans=prompt.spans,
        text="",
        finish=Finish.GIVEN,
    )
