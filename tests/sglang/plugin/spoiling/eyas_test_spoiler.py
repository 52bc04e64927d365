"""A plugin for tests: writes over a batch's hidden states between its launch and its processing.

So does the next batch under CUDA graphs, which no CPU runs. Whoever reads the rows when the batch is
processed gets these numbers.
"""

SPOILED = 12345.0


def load() -> None:
    """Register it, outside of every other hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result", spoil, HookType.BEFORE
    )


def spoil(scheduler, batch, result):
    """Write over what the forward pass left."""
    output = getattr(result, "logits_output", None)
    for rows in (getattr(output, "hidden_states", None), getattr(output, "last_hidden_states", None)):
        if rows is not None:
            rows.fill_(SPOILED)
