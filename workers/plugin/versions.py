"""Which releases of SGLang the plugin was tried with; another is refused, since it hooks private names."""

from collections.abc import Mapping

from storage.errors import UnsuitableError

TRIED = ("0.5.23",)
"""Released versions, each with the whole of tests/sglang."""
ANY_VERSION = "EYAS_PLUGIN_ANY_VERSION"
"""Environment: `1` tries a version that is not in the list."""


def check_version(version: str, environ: Mapping[str, str]) -> None:
    """Raises `UnsuitableError` for a version that was not tried, unless the environment allows it."""
    if version not in TRIED and environ.get(ANY_VERSION) != "1":
        raise UnsuitableError(
            f"eyas: SGLang {version} was not tried with this plugin; tried: {', '.join(TRIED)}",
            code="server.version",
            hint=f"install `sglang=={TRIED[-1]}`; or set {ANY_VERSION}=1 and compare rows before a run; or "
            "leave the plugin out: SGLANG_PLUGINS=none",
        )
