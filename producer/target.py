"""The target model of a run: its folder here and the spec it makes.

What a flag does not say is taken from the run that is already there, else from the server. Nothing
is written here (`enqueue.py`).
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from producer.captures import resolve_capture, sizes_of
from producer.datasets.model_folder import ModelFolder, find_model
from producer.datasets.template import Template
from producer.servers import Servers, require_one
from storage.errors import UnsuitableError
from storage.run import CaptureSpec, RunSpec, Sampling, StatesMode
from storage.settings import RunSettings
from workers.sglang.facts import ServerFacts
from workers.sglang.suitability import same_model

REQUEST_MARGIN = 6
"""SGLang keeps so many tokens of the context for itself: `max_req_input_len`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asks of the model and its run; None where it leaves the choice open."""

    model: str | None
    capture: str | None
    states: StatesMode | None
    short_max_tokens: int | None
    long_max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model of a run."""

    folder: ModelFolder
    spec: RunSpec
    max_input_tokens: int
    """A request's ids must be fewer."""


class TemplateLoader:
    """The target's tokenizer, loaded by the first who needs it: a second that a skip does not take."""

    def __init__(self, folder: ModelFolder, *, trust_remote_code: bool) -> None:
        self._folder = folder
        self._trust_remote_code = trust_remote_code
        self._loaded: Template | None = None

    def __call__(self) -> Template:
        """The loaded tokenizer."""
        if self._loaded is None:
            self._loaded = Template(self._folder, trust_remote_code=self._trust_remote_code)
        return self._loaded


def find_target(
    asked: Asked,
    servers: Servers,
    stored: RunSpec | None,
    settings: RunSettings | None,
) -> tuple[Target, TemplateLoader]:
    """The target of the run in the folder, or of one that begins now.

    Raises `UnavailableError` when neither a flag, nor the run, nor a server says which model.
    """
    facts = servers.any if stored is not None else require_one(servers)
    model = _model(asked.model, stored, facts)
    folder = find_model(model)
    load = TemplateLoader(folder, trust_remote_code=asked.trust_remote_code)
    digest = folder.tokenizer_digest()
    same_tokenizer = stored is not None and stored.tokenizer_digest == digest
    vocab_size = stored.vocab_size if stored is not None and same_tokenizer else load().vocab_size
    states = asked.states or (settings.states if settings else StatesMode.REPLAY)
    spec = RunSpec(
        model=model,
        tokenizer_digest=digest,
        template_digest=folder.template_digest(),
        vocab_size=vocab_size,
        sampling=_sampling(asked, stored),
        short_max_tokens=_first(asked.short_max_tokens, stored.short_max_tokens if stored else 10240),
        long_max_tokens=_first(asked.long_max_tokens, stored.long_max_tokens if stored else 16384),
        states=states,
        capture=None if states is StatesMode.OFF else _capture(asked, servers, settings, folder),
    )
    config = folder.config()
    knows = config.get("vocab_size")
    if isinstance(knows, int) and knows < vocab_size:
        raise UnsuitableError(
            f"the tokenizer of `{model}` makes `{vocab_size}` ids, its model knows `{knows}`",
            code="tokenizer.vocabulary",
            hint="give the folder or hub id of the served model with `--model`",
        )
    most = settings.max_input_tokens if settings else max_input_tokens(servers, folder)
    if most is None:
        raise UnsuitableError(
            "neither a server nor a `config.json` says how long a request may be",
            code="model.sizes",
            hint="start the server with `--context-length`",
        )
    return Target(folder=folder, spec=spec, max_input_tokens=most), load


def max_input_tokens(servers: Servers | None, folder: ModelFolder) -> int | None:
    """A request's ids must be fewer: the least of what the servers say, else the model's context."""
    facts = [*servers.generating.values(), *servers.capturing.values()] if servers is not None else []
    said = [one.max_input_tokens or (one.context_length or 0) - REQUEST_MARGIN for one in facts]
    context = folder.config().get("max_position_embeddings")
    told = [tokens for tokens in said if tokens > 0]
    if not told and isinstance(context, int):
        told = [context - REQUEST_MARGIN]
    return min(told, default=None)


def model_name(model: str) -> str:
    """A folder by its whole path, so that it means the same from everywhere; a hub id as it is."""
    path = Path(model).expanduser()
    return os.path.abspath(path) if path.is_dir() else model  # noqa: PTH100  (keeps symbolic links)


def _model(asked: str | None, stored: RunSpec | None, facts: ServerFacts | None) -> str:
    if asked is not None:
        named = model_name(asked)
        return stored.model if stored is not None and same_model(stored.model, named) else named
    if stored is not None:
        return stored.model
    assert facts is not None
    return facts.model


def _capture(
    asked: Asked, servers: Servers, settings: RunSettings | None, folder: ModelFolder
) -> CaptureSpec:
    before = settings.capture if settings else None
    name = asked.capture or (before.name if before else "eagle3")
    if before is not None and before.name == name:
        return before
    facts = servers.for_states
    return resolve_capture(name, sizes_of(folder.config(), facts), facts)


def _sampling(asked: Asked, stored: RunSpec | None) -> Sampling:
    chosen = stored.sampling if stored else Sampling()
    for name in ("temperature", "top_p", "top_k", "seed"):
        value = getattr(asked, name)
        if value is not None:
            chosen = replace(chosen, **{name: value})
    return chosen


def _first(asked: int | None, otherwise: int) -> int:
    return otherwise if asked is None else asked
