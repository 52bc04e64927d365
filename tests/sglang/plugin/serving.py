"""Starts a real SGLang with the plugin, and holds its rows against transformers."""

from asking import NODE, worst_cosine
from installing import with_plugins

from tests.sglang.environment.server import running_sglang

AUX = (
    "--enable-return-hidden-states",
    "--enable-return-aux-hidden-states",
    "--speculative-algorithm",
    "EAGLE3",
)
EAGLE3 = [2, 4, 5, 8]
CLOSE = 0.999
"""A shifted or foreign row is far below; bf16 arithmetic is far above."""
SPOOL_GB = 0.05


def serve(environment, folder, *flags, environ=None, **plugins):
    """A running server whose spool is `folder/spool`."""
    return running_sglang(
        environment,
        *flags,
        log=folder / "log",
        environ={
            "EYAS_NODE": NODE,
            "EYAS_SPOOL_DIR": str(folder / "spool"),
            "EYAS_SPOOL_MAX_GB": str(SPOOL_GB),
            **with_plugins(folder / "site", **plugins),
            **(environ or {}),
        },
    )


def check_rows(asker, answers, environment, folder):
    rows = [asker.rows(answer.said) for answer in answers]
    assert worst_cosine(answers, rows, EAGLE3, environment, folder) > CLOSE
    assert asker.files() == []
    return sum(map(len, rows))
