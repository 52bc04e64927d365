"""Where the plugin enters SGLang: one table of its functions, and what is done around each.

Every name here is private to SGLang and was tried with the releases in `versions.py`. What is done
is in `capture.py`; this file only knows where.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from storage.errors import EyasError
from storage.spool import Spool
from workers.config import load_config
from workers.plugin.capture import Capture
from workers.plugin.facts import ModelFacts, read_model
from workers.plugin.launch import Launch
from workers.plugin.of_sglang import ATTRIBUTE, KEY
from workers.plugin.offering import Offered
from workers.plugin.order import order_of
from workers.plugin.route import add_route
from workers.plugin.startup import captures, check_arguments
from workers.plugin.writing import Writer

logger = logging.getLogger("eyas")
Original = Callable[..., Any]
IDLE_S = 0.0005
"""Each turn of an idle scheduler while a reply waits for its file."""
_SRT = "sglang.srt."
_SCHEDULER = _SRT + "managers.scheduler.Scheduler."
_RESULTS = _SRT + "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
_OUTPUT = _SRT + "managers.scheduler_components.output_streamer."


class Hooks:
    """One process's hooks; in a process that schedules nothing most are never called."""

    def __init__(self) -> None:
        self._capture: Capture | None = None
        """None until the model is loaded, and on a server that gives no states."""
        self._offering = False
        """Whether files of the spool go out over HTTP."""
        self._launching: Launch | None = None
        """The batch whose forward pass is being queued."""

    def table(self) -> dict[str, Callable[..., Any]]:
        """SGLang's function → what goes around it."""
        return {
            _SRT + "server_args.ServerArgs.check_server_args": self.check_arguments,
            _SCHEDULER + "get_init_info": self.scheduler_info,
            _SRT + "managers.data_parallel_controller.DataParallelController.get_init_info": self.ranks_info,
            _SRT
            + "layers.logits_processor.LogitsProcessor._get_last_hidden_states_to_store": self.final_state,
            _SCHEDULER + "run_batch": self.run_batch,
            _SRT + "managers.utils.GenerationBatchResult.copy_to_cpu": self.copy_to_cpu,
            _SCHEDULER + "process_batch_result": self.process_batch_result,
            _RESULTS + "_append_prefill_hidden_states": self.prefilled,
            _RESULTS + "_append_decode_hidden_states": self.decoded,
            _OUTPUT + "_GenerationStreamAccumulator.accept": self.accept,
            _OUTPUT + "SchedulerOutputStreamer.is_request_level_customized_info_key": self.once_a_request,
            _SCHEDULER + "ingest_requests": self.ingest_requests,
            _SCHEDULER + "abort_request": self.abort_request,
            _SCHEDULER + "on_idle": self.on_idle,
            _SRT + "managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep": self.maybe_sleep,
            _SRT + "managers.tokenizer_manager.TokenizerManager.update_request_meta_info": self.meta_info,
        }

    def check_arguments(self, original: Original, arguments: Any) -> Any:
        """At start, in the main process: what cannot be captured right is refused there."""
        result = original(arguments)
        resolved = arguments.resolved_dict()
        if captures(resolved):
            try:
                check_arguments(resolved, os.environ)
                self._offer(_spool())
            except EyasError as error:
                raise SystemExit(said(error)) from None
        return result

    def _offer(self, spool: Spool) -> None:
        """Offer the spool over HTTP, unless SGLang is used as a library: then nobody fetches anything."""
        http = sys.modules.get(_SRT + "entrypoints.http_server")
        if http is not None and not self._offering:
            self._offering = True
            offered = Offered(spool)
            add_route(http.app, offered)
            offered.sweep_on()

    def scheduler_info(self, original: Original, scheduler: Any) -> Any:
        """The model is loaded: what it gives goes to `/server_info`."""
        info = original(scheduler)
        if captures(scheduler.server_args.resolved_dict()):
            try:
                facts, spool = _facts(scheduler), _spool()
            except EyasError as error:
                raise RuntimeError(said(error)) from None  # SGLang logs it and ends the server
            from workers.plugin.host_copy import take

            self._capture = Capture(facts, Writer(spool), take, replies=_replies())
            info["eyas"] = facts.announced(spool.node)
            logger.info("eyas: event=capturing node=%s hs_indices=%s", spool.node, list(facts.given))
        return info

    def ranks_info(self, original: Original, controller: Any) -> Any:
        """What the first data-parallel rank says stands for all."""
        info = original(controller)
        first = controller._scheduler_init_infos[0].get("eyas")
        return {**info, "eyas": first} if first else info

    def final_state(self, original: Original, processor: Any, hidden: Any, aux: Any, metadata: Any) -> Any:
        """Keep the final state beside the auxiliary layers, and on a server without them too."""
        if metadata.capture_hidden_mode.is_full():
            return hidden
        return original(processor, hidden, aux, metadata)

    def run_batch(self, original: Original, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Launch a batch and copy its rows behind it."""
        launch = self._capture.launch(batch) if self._capture else None
        if launch is None or self._capture is None:
            return original(scheduler, batch, *args, **kwargs)
        self._launching = launch
        try:
            result = original(scheduler, batch, *args, **kwargs)
        finally:
            self._launching = None
        if getattr(result, "delay_sample_func", None) is None:  # else its own copy is made later
            self._capture.take(launch, getattr(result, "logits_output", None))
        setattr(result, ATTRIBUTE, launch)
        return result

    def copy_to_cpu(self, original: Original, result: Any, *args: Any, **kwargs: Any) -> Any:
        """With the batch's own copy, on its stream, before it puts host tensors in place of the device's."""
        launch = self._launching or vars(result).get(ATTRIBUTE)
        if launch is not None and self._capture is not None:
            self._capture.take(launch, result.logits_output)
        return original(result, *args, **kwargs)

    def process_batch_result(self, original: Original, scheduler: Any, batch: Any, result: Any) -> Any:
        """Hand out the rows while SGLang looks at each request."""
        launch = vars(result).get(ATTRIBUTE)
        if launch is None or self._capture is None:
            return original(scheduler, batch, result)
        self._capture.arrive(launch)
        try:
            return original(scheduler, batch, result)
        finally:
            self._capture.leave(launch)

    def prefilled(self, original: Original, processor: Any, **given: Any) -> int:
        """Rows of a chunk; SGLang's own way would make lists of floats of them."""
        request = given["req"]
        order = order_of(request)
        if order is None or self._capture is None:
            offset: int = original(processor, **given)
            return offset
        self._capture.keep(request, order, last_chunk=given.get("store", True))
        full = given["capture_hidden_mode"].is_full()
        return int(given["hidden_state_offset"] + (given["extend_input_len"] if full else 1))

    def decoded(self, original: Original, **given: Any) -> None:
        """The row of one decoded token."""
        order = order_of(given["req"])
        if order is None or self._capture is None:
            original(**given)
        else:
            self._capture.keep_rows(given["req"], order)

    def accept(self, original: Original, accumulator: Any, *, req: Any) -> None:
        """A finished request's reply waits until its states are written."""
        order = order_of(req)
        if order is None or self._capture is None or not req.finished() or self._capture.may_go(req, order):
            original(accumulator, req=req)

    def once_a_request(self, original: Original, streamer: Any, key: str) -> bool:
        """Where the states are is said once, not once a token."""
        return key == KEY or bool(original(streamer, key))

    def ingest_requests(self, original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Each turn of the scheduler's loop: send the replies whose states are written."""
        if self._capture is not None:
            self._capture.tidy()
            if self._capture.holding:
                for request in self._capture.released():
                    scheduler.output_streamer.stream_output([request], request.return_logprob)
        return original(scheduler, *args, **kwargs)

    def abort_request(self, original: Original, scheduler: Any, asked: Any) -> Any:
        """Clients that left."""
        if self._capture is not None and self._capture.holding:
            self._capture.abort(asked.rid or "", everything=bool(asked.abort_all) or not asked.rid)
        return original(scheduler, asked)

    def on_idle(self, original: Original, scheduler: Any) -> Any:
        """With nothing to compute the loop spins, and keeps the interpreter from the writers it waits for."""
        result = original(scheduler)
        if self._capture is not None and self._capture.holding:
            time.sleep(IDLE_S)
        return result

    def maybe_sleep(self, original: Original, sleeper: Any) -> None:
        """With `--sleep-on-idle`: not for a second while a reply waits."""
        if self._capture is None or not self._capture.holding:
            original(sleeper)

    def meta_info(
        self, original: Original, manager: Any, meta: Any, state: Any, info: Any, *rest: Any
    ) -> Any:
        """In the tokenizer's process: what was said once is a value of the reply, not a list."""
        said_of = info.get(KEY)
        if said_of is None:
            return original(manager, meta, state, info, *rest)
        index = rest[0]
        if said_of[index]:
            meta[KEY] = said_of[index][-1]
        others = {key: values for key, values in info.items() if key != KEY}
        return original(manager, meta, state, others, *rest) if others else None


def said(error: EyasError) -> str:
    """The error as it is printed."""
    return f"error: {error.message}" + (f"\n\nhint: {error.hint}" if error.hint else "")


def _spool() -> Spool:
    """The spool of this machine, by the same settings as the workers'."""
    config = load_config()
    return Spool(config.spool_dir, config.node, config.spool_max_bytes)


def _facts(scheduler: Any) -> ModelFacts:
    runner = scheduler.tp_worker.model_runner
    return read_model(
        runner.model,
        scheduler.model_config.hf_text_config,
        kv_dtype=runner.kv_cache_dtype,
        kv_name=getattr(runner, "kv_cache_dtype_str", None),
    )


def _replies() -> bool:
    """Whether this rank's output reaches clients: the first of each data-parallel rank."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return (parallel.pp_rank, parallel.attn_tp_rank, parallel.attn_cp_rank) == (0, 0, 0)
