"""The target model's small files on this machine: found here or on the hub, and identified.

What makes a tokenizer and a chat template is in the run's fingerprint as a digest of its files.
Loading and applying them is in `template.py`.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.errors import UnavailableError, UnsuitableError
from storage.files import NAME, read_json

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tokenization_*.py"),
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
OTHER_FILES = ("config.json", "hf_quant_config.json", "configuration_*.py", "*.py")
"""Read for the model's sizes, or imported by a tokenizer's own code; in no digest."""


MOST_BYTES = 256 << 20
"""Of one file; the largest known vocabulary takes 40 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A target model's small files on this machine."""

    model: str
    """As the user or the server names it."""
    path: Path

    def tokenizer_digest(self) -> str:
        """BLAKE2b-16 in hex over names and bytes of the tokenizer's files: the same on every version
        of every library.
        """
        return _digest(self.path, (*TOKENIZER_FILES, *self._helpers()))

    def _helpers(self) -> list[str]:
        """The modules of the tokenizer's own code and what they import from beside them, if it has any."""
        try:
            own = read_json(self.path / "tokenizer_config.json").get("auto_map")
        except FileNotFoundError:
            return []
        named = own.get("AutoTokenizer") if isinstance(own, dict) else None
        modules = {
            f"{one.rpartition('.')[0]}.py"
            for one in (named if isinstance(named, list) else [named])
            if isinstance(one, str) and NAME.fullmatch(one)
        }
        found = sorted(name for name in modules if (self.path / name).is_file())
        if not found:
            return []
        from transformers.dynamic_module_utils import get_relative_import_files

        imported = (Path(path) for name in found for path in get_relative_import_files(self.path / name))
        return sorted({path.name for path in imported if path.parent == self.path} | set(found))

    def template_digest(self) -> str:
        """BLAKE2b-16 in hex over the chat template, wherever these files hold it."""
        try:
            inside = read_json(self.path / "tokenizer_config.json").get("chat_template")
        except FileNotFoundError:
            inside = None
        return _digest(self.path, TEMPLATE_FILES, json.dumps(inside, sort_keys=True).encode())

    def config(self) -> dict[str, Any]:
        """`config.json`, of a model with several parts that of its text part; empty without one."""
        try:
            config = read_json(self.path / "config.json")
        except FileNotFoundError:
            return {}
        inner = config.get("text_config") or config.get("llm_config")
        return inner if isinstance(inner, dict) else config


def find_model(model: str) -> ModelFolder:
    """The folder of this name, else the hub's files of this id, from its cache or the network.

    Raises `UnavailableError` when neither is there.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        folder = ModelFolder(model=model, path=path.absolute())
        if not any(next(path.glob(pattern), None) for pattern in TOKENIZER_FILES):
            raise UnavailableError(
                f"`{model}` holds no tokenizer",
                code="tokenizer.missing",
                hint="name the target's hub id or a folder with its tokenizer by `--model`",
            )
        return _bounded(folder)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = [*TOKENIZER_FILES, *TEMPLATE_FILES, *OTHER_FILES]
    try:
        found = snapshot_download(model, allow_patterns=wanted)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UnavailableError(
            f"no tokenizer for `{model}`: no such folder, and the hub gives none ({type(error).__name__})",
            code="tokenizer.missing",
            hint="name the target's hub id or a folder with its tokenizer by `--model`",
        ) from None
    return _bounded(ModelFolder(model=model, path=Path(found)))


def _bounded(folder: ModelFolder) -> ModelFolder:
    """The folder. Raises `UnsuitableError` when one of its files is none, or too large to be what it says."""
    for pattern in (*TOKENIZER_FILES, *TEMPLATE_FILES, *OTHER_FILES):
        for file in folder.path.glob(pattern):
            wrong = None
            if not file.is_file():
                wrong = "is no file"
            elif file.stat().st_size > MOST_BYTES:
                wrong = f"has `{file.stat().st_size}` bytes, no tokenizer more than `{MOST_BYTES}`"
            if wrong:
                raise UnsuitableError(
                    f"`{file}` {wrong}",
                    code="tokenizer.size",
                    hint="name the target's hub id or a folder with its tokenizer by `--model`",
                )
    return folder


def _digest(folder: Path, patterns: Sequence[str], before: bytes = b"") -> str:
    digest = hashlib.blake2b(before, digest_size=16)
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
        name = file.relative_to(folder).as_posix().encode()
        content = file.read_bytes()
        digest.update(len(name).to_bytes(4, "little") + name + len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
