"""Token ids to text and back with a model's `tokenizer.json`; a model without one has no text."""

import json
from collections.abc import Sequence
from pathlib import Path


class Detokenizer:
    """One model's tokenizer."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        self._tokenizer = None
        self.special_ids: frozenset[int] = frozenset()
        """Ids that no text consists of."""
        if path.exists():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
            added = json.loads(path.read_bytes()).get("added_tokens", [])
            self.special_ids = frozenset(token["id"] for token in added if token.get("special"))

    def text(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The ids as text; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def ids(self, text: str) -> list[int]:
        """The text as ids; empty without a tokenizer."""
        return list(self._tokenizer.encode(text).ids) if self._tokenizer is not None else []
