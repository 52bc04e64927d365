"""What SGLang calls in each of its processes as it starts: the entry point `eyas` of `sglang.srt.plugins`.

SGLang goes on without a plugin that raises, and without a hook whose function is not there. A server
that looks like a capture server and is none would be found out late, so both end it here.
"""

import os
import pkgutil
from importlib.metadata import version

from storage.errors import EyasError, UnsuitableError
from workers.plugin.hooks import Hooks, said
from workers.plugin.versions import check_version


def load() -> None:
    """Register the hooks; ends the process when SGLang is not one that was tried."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        check_version(version("sglang"), os.environ)
        hooks = Hooks().table()
        for target in hooks:
            _check_there(target)
    except EyasError as error:
        raise SystemExit(said(error)) from None  # an exception would only be logged
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _check_there(target: str) -> None:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise UnsuitableError(
            f"eyas: this SGLang has no `{target}`: {error}",
            code="server.version",
            hint="leave the plugin out: SGLANG_PLUGINS=none",
        ) from None
