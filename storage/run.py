"""What a run is: the spec that never changes, its fingerprint, and `run.json`.

What may change while it goes on is in `settings.py`. This file does not create the store's
groups (`store.py`) and does not know where the values come from.
"""

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from storage.errors import DamagedError, RunReplacedError, UnavailableError, UnsuitableError
from storage.files import NAME, create_json, read_json
from storage.json_records import read_record

DEFAULT_OUTPUT_DIR = "eyas-data"
"""The run's folder, below the working folder, when nobody names one."""
FORMAT = 1
"""Version of the store's layout; a reader refuses a newer one."""


class StatesMode(StrEnum):
    """When hidden states are taken."""

    REPLAY = "replay"
    """After generating, by one prefill of prompt and response: a row for every token."""
    INLINE = "inline"
    """While generating: no row for the last token."""
    OFF = "off"
    """Not now; any capture may be made later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the target model picks tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 considers every token."""
    seed: int = 0
    """Mixed with the prompt's id into the request's `sampling_seed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSpec:
    """Which hidden states are kept, in Hugging Face's words."""

    name: str
    """Folder under `states/`: `eagle3`, `aux`, `final`, or `hs-2-16-29`."""
    hs_indices: tuple[int, ...]
    """Indices into `hidden_states`, ascending; n, the number of blocks, is the final state."""
    norm: str
    """`post` when the final state has passed the final norm; `none` when it is not among them."""
    hidden_size: int
    """H."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for what is no capture: its name becomes a folder's."""
        if (
            not NAME.fullmatch(self.name)
            or not self.hs_indices
            or min(self.hidden_size, *self.hs_indices) < 0
        ):
            raise ValueError(f"no capture: `{self}`"[:200])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """All that decides what a sample of this run is."""

    model: str
    """The target's hub id or path, as the server names it."""
    tokenizer_digest: str
    """Over the tokenizer's files, hex."""
    template_digest: str
    """Over the chat template's text, hex."""
    vocab_size: int
    """Ids run from 0 to this, exclusive."""
    sampling: Sampling
    short_max_tokens: int
    """Most response tokens of the lane `short`."""
    long_max_tokens: int
    """Most response tokens of the lane `long`."""
    states: StatesMode
    capture: CaptureSpec | None
    """None exactly when `states` is off."""

    def to_json(self) -> dict[str, Any]:
        """As `run.json` holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RunSpec":
        """The inverse of `to_json`; raises `ValueError`."""
        return read_record(cls, content, extra="refused")

    @property
    def fingerprint(self) -> str:
        """32 hex digits over the canonical JSON of every field."""
        return fingerprint(self.to_json())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One output folder's identity."""

    id: str
    """Random, 32 hex digits: what messages carry."""
    spec: RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """All that decides which prompts a dataset gives: attributes of `prompts/<name>`."""

    name: str
    source: str
    """As the manifest says it: `file:prompts.jsonl`."""
    source_digest: str
    """Over the source's bytes, hex."""
    form: str
    """`text`, `messages`, `conversations`, `turns` or `input_ids`."""
    column: str
    """The column the form was found in."""
    lane: str
    """`short`, `long`, `auto` or `capture`."""
    semantics: Mapping[str, Any]
    """Everything else the manifest says of how a row becomes a prompt."""

    def to_json(self) -> dict[str, Any]:
        """As the group's attributes hold it."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "semantics": dict(self.semantics)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "DatasetSpec":
        """The inverse of `to_json`, other keys ignored; raises `ValueError`."""
        return read_record(cls, content, extra="ignored")

    @property
    def fingerprint(self) -> str:
        """32 hex digits over the canonical JSON of every field."""
        return fingerprint(self.to_json())


def fingerprint(content: Mapping[str, Any]) -> str:
    """BLAKE2b-16 in hex over JSON with sorted keys and no spaces."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Each value that differs, as `name: stored → wanted`, nested names joined by dots."""
    found = []
    for key in sorted({*stored, *wanted}):
        old, new = stored.get(key), wanted.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{prefix}{key}.")
        elif _plain(old) != _plain(new):
            found.append(f"{prefix}{key}: `{old}` → `{new}`")
    return found


def read_run(output: Path) -> Run | None:
    """The run in this folder, or None when there is none.

    Raises `UnsuitableError` for a newer format and `DamagedError` for a file that is no run's.
    """
    path = output / "run.json"
    try:
        content = read_json(path)
    except FileNotFoundError:
        return None
    if not isinstance(content.get("format", 0), int):
        raise DamagedError(f"`{path}` is not a run: format `{content['format']}`"[:300], code="run.damaged")
    if content.get("format", 0) > FORMAT:
        raise UnsuitableError(
            f"`{path}` has format `{content['format']}`; this Eyas reads up to `{FORMAT}`",
            code="run.newer",
            hint="pip install --upgrade eyas",
        )
    try:
        run = Run(id=str(content["id"]), spec=RunSpec.from_json(content["spec"]))
        fits = run.spec.fingerprint == content.get("fingerprint")
    except (KeyError, ValueError) as error:
        raise DamagedError(f"`{path}` is not a run: {error!r}", code="run.damaged") from None
    if not fits:
        raise DamagedError(
            f"`{path}` was edited: its fingerprint does not match",
            code="run.edited",
            hint="restore it, or start in another folder with `--output-dir`",
        )
    return run


def create_or_check_run(output: Path, spec: RunSpec) -> Run:
    """The folder's run, written now if there is none.

    `run.json` is linked into place, so of two that begin at once one wins and both agree.
    Raises `UnsuitableError` naming each difference when the folder holds another run. A run
    made with states `off` takes any states mode but `inline` and any capture later.
    """
    run = read_run(output)
    if run is None:
        run = Run(id=uuid.uuid4().hex, spec=spec)
        content = {"format": FORMAT, "id": run.id, "fingerprint": spec.fingerprint, "spec": spec.to_json()}
        return run if create_json(output / "run.json", content) else create_or_check_run(output, spec)
    stored, wanted = run.spec.to_json(), spec.to_json()
    if run.spec.states is StatesMode.OFF and spec.states is not StatesMode.INLINE:
        for later in ("states", "capture"):
            stored.pop(later), wanted.pop(later)
    found = differences(stored, wanted)
    if found:
        raise UnsuitableError(
            f"`{output}` holds another run: {'; '.join(found)}",
            code="run.other",
            hint="choose another folder with `--output-dir`, or the values it was begun with",
        )
    return run


def _plain(value: Any) -> Any:
    """Tuples as lists: JSON does not tell them apart."""
    return list(value) if isinstance(value, tuple) else value


def check_run(output: Path, run: Run) -> None:
    """Whether the folder still holds this run: whoever deleted it may have begun another there.

    Raises `RunReplacedError` naming both, and `UnavailableError` when none can be read there.
    """
    path = output / "run.json"
    try:
        found = read_json(path).get("id")
    except (OSError, DamagedError) as error:
        why = error.message if isinstance(error, DamagedError) else error.strerror
        raise UnavailableError(
            f"`{path}` of run `{run.id}` cannot be read: {why}",
            code="run.gone",
            hint="bring the folder back; or, if it is not wanted any more, `producer cancel`",
        ) from error
    if found != run.id:
        raise RunReplacedError(
            f"`{output}` holds run `{found}` now, not run `{run.id}`: nothing more is committed to it",
            code="run.replaced",
            hint="put the folder of that run back; or, if it is not wanted any more, `producer cancel`",
        )
