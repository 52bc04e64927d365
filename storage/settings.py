"""What may change while a run goes on: `settings.json`, replaced atomically.

The feeder reads it again whenever it changes and passes it to the lanes. Who may change what is
said by the commands; this file only keeps it.
"""

import fcntl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from storage.errors import DamagedError
from storage.files import NAME, read_json, write_json
from storage.json_records import read_record
from storage.retries import Retry
from storage.run import CaptureSpec, RunSpec, StatesMode

CHECK_EVERY = 500
"""A check costs one prefill more: of one sample in so many that is 0.2 % of a run's captures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSettings:
    """What is wanted of one dataset."""

    max_samples: int | None = None
    """The first so many prompts; None for all."""
    max_tokens: int | None = None
    """Prompt and response tokens stored; None for no cap."""


UNQUANTIZED = "unquantized"
"""Of a KV cache: in the model's own dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What the model's own files say that its servers do not; None where nobody does."""

    num_layers: int | None = None
    """n, blocks."""
    quantization: str | None = None
    """Method of its weights, `compressed-tensors` and such; None when they are not quantized."""
    auto_kv: str | None = None
    """What a KV cache left to `auto` becomes: `UNQUANTIZED`, or `fp8` and such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Caps, limits and addresses of a run."""

    server_urls: tuple[str, ...]
    """Servers that generate."""
    capture_urls: tuple[str, ...]
    """Servers that capture; the generating ones when none is named."""
    concurrency: Mapping[str, int]
    """Lane → calls in flight per server."""
    max_input_tokens: int
    """Longest request the servers take: prompt and response must stay below it to be captured."""
    states: StatesMode
    capture: CaptureSpec | None
    allow_quantized_kv: bool = False
    check_every: int = CHECK_EVERY
    """One sample in so many is captured a second time and checked; 0 for none."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Looked up by `enqueue`, so that lanes need not have the model's files."""
    datasets: Mapping[str, DatasetSettings] = field(default_factory=dict)
    """Dataset → what is wanted of it; a dataset not named here is not wanted."""
    retries: tuple[Retry, ...] = ()
    """Dead letters asked for again, in the order of asking."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for a dataset that cannot be a folder's name."""
        if wrong := [name for name in self.datasets if not NAME.fullmatch(name)]:
            raise ValueError(f"no dataset's name: `{wrong[0]}`"[:200])

    def to_json(self) -> dict[str, Any]:
        """As `settings.json` and Redis hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RunSettings":
        """The inverse of `to_json`; raises `ValueError`."""
        return read_record(cls, content, extra="refused")


def all_wanted(spec: RunSpec, datasets: Iterable[str]) -> RunSettings:
    """What a run wants as far as its spec tells: all of these datasets, without caps."""
    return RunSettings(
        server_urls=(),
        capture_urls=(),
        concurrency={},
        max_input_tokens=0,
        states=spec.states,
        capture=spec.capture,
        datasets={name: DatasetSettings() for name in datasets},
    )


def read_settings(output: Path) -> RunSettings:
    """The folder's settings.

    Raises `FileNotFoundError` when there are none and `DamagedError` when they cannot be read.
    """
    path = output / "settings.json"
    try:
        return RunSettings.from_json(read_json(path))
    except (DamagedError, ValueError) as error:
        raise DamagedError(
            error.message if isinstance(error, DamagedError) else f"`{path}` cannot be read: {error!r}",
            code="settings.damaged",
            hint=f"rm '{path}', then run `producer enqueue` again for all datasets of the run",
        ) from None


@contextmanager
def changing_settings(output: Path) -> Iterator[None]:
    """While it lasts nobody else changes the settings of this run: what is read is what is replaced.

    The lock is on `run.json`, which is always there and never replaced. A file system without
    locks has to do without.
    """
    with (output / "run.json").open("r+b") as held:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def write_settings(output: Path, settings: RunSettings) -> None:
    """Replace the folder's settings, durably and at once."""
    write_json(output / "settings.json", settings.to_json())
