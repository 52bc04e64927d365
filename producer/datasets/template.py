"""The target's tokenizer and chat template: loaded, and applied in batches.

Rendered text is encoded with no special tokens added: a chat template writes its own. Which rows
are rendered and what becomes of them is in `prompts.py`.
"""

import gc
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from producer.datasets.bounds import MOST_CHARACTERS, RENDER_S, Bounds, TimeUpError, why_unsafe
from producer.datasets.model_folder import ModelFolder
from storage.errors import UnsuitableError

PROBES = ("Hello, world! ", " two  spaces\n\n\ttab", "naïve 猫 🦊 e\u0301", "<s>[INST] x <|im_end|></s>", "")
SHORTEST_SPECIAL = 3
"""Characters of a special token that counts when it is typed: a padding token may be a mere `!`."""
OFTEN_LATE = 3
"""Conversations that took too long until the template is to blame, not one of them."""
_UNASKED = "\0"
"""Stands for a generation prompt nobody has looked for yet."""


class Template:
    """A loaded tokenizer with its chat template."""

    def __init__(
        self, folder: ModelFolder, *, trust_remote_code: bool = False, render_s: float = RENDER_S
    ) -> None:
        """Loads it; a second for the first in a process.

        Raises `UnsuitableError` when it cannot be loaded, naming the flag if its own code is why.
        """
        # Without torch transformers says so on import; nothing here needs it.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.model = folder.model
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                folder.path, trust_remote_code=trust_remote_code, local_files_only=True
            )
        # The edge where foreign files enter a library that says in many ways what is wrong with them.
        except Exception as error:
            own_code = "trust_remote_code" in str(error)
            raise UnsuitableError(
                f"the tokenizer of `{folder.model}` cannot be loaded: "
                + ("it brings its own code" if own_code else f"{type(error).__name__}: {error}"[:500]),
                code="tokenizer.code" if own_code else "tokenizer.unusable",
                hint="read that code, then add `--trust-remote-code`"
                if own_code
                else "name another with `--model`",
            ) from None
        for text in _texts_of(getattr(self._tokenizer, "chat_template", None)):
            if why := why_unsafe(text):
                raise UnsuitableError(
                    f"the chat template of `{folder.model}` may not be run: {why}"[:500],
                    code="template.unsafe",
                    hint="name another model with `--model`, or mend its `chat_template`",
                )
        self._bounds, self._late = Bounds(render_s), 0
        self.vocab_size = len(self._tokenizer)
        self._longest: int | None = None
        self._special = _any_of(self._special_tokens())
        self._generation_prompt: str | None = _UNASKED
        self._ids: dict[str, list[int]] = {}
        self._direct = self._find_direct()
        # The libraries' objects never go away; without this every full collection visits them all.
        gc.freeze()

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render(self, messages: list[dict[str, Any]], *, for_answer: bool = True) -> str:
        """The conversation as the template writes it; with `for_answer` up to where the model begins.

        Raises `TemplateRefusedError` when the template does, or takes more time or memory than any
        conversation needs, and `UnsuitableError` when it takes too long again and again.
        """
        try:
            with self._bounds.kept():
                text = self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=for_answer
                )
        except TimeUpError as error:
            self._late += 1
            if self._late < OFTEN_LATE:
                raise TemplateRefusedError(str(error)) from None
            raise UnsuitableError(
                f"the chat template of `{self.model}` took longer than {self._bounds.render_s:g} s for "
                f"each of `{self._late}` conversations",
                code="template.endless",
                hint="name another model with `--model`, or mend its `chat_template`",
            ) from None
        # The edge where a foreign program runs: it may end in any way.
        except Exception as error:
            raise TemplateRefusedError(f"{type(error).__name__}: {error}"[:300]) from None
        if not isinstance(text, str) or len(text) > MOST_CHARACTERS:
            raise TemplateRefusedError(f"it makes more than {MOST_CHARACTERS} characters")
        return text

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: no text has fewer tokens than its length holds of these."""
        if self._longest is None:
            self._longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        return self._longest

    def generation_prompt(self, messages: list[dict[str, Any]]) -> str | None:
        """What the template adds for the model to begin with; None when that cannot be told.

        It is the same after every user turn, so it is found once, by rendering one conversation
        both ways.
        """
        if self._generation_prompt is _UNASKED:
            self._generation_prompt = None
            try:
                with_it = self.render(messages)
                without = self.render(messages, for_answer=False)
            except TemplateRefusedError:
                return None
            if with_it.startswith(without):
                self._generation_prompt = with_it.removeprefix(without)
        return self._generation_prompt

    def ids_of(self, text: str) -> list[int]:
        """The ids of a text that comes again and again."""
        if text not in self._ids:
            self._ids[text] = self.encode([text]).ids[0]
        return self._ids[text]

    def encode(self, texts: Sequence[str], *, positions: bool = False) -> "Encoded":
        """The texts' ids, on all cores where the tokenizer can; `positions` says which token is where.

        Past transformers' own call where that gives the same: it would compute positions always,
        a third of the whole time.
        """
        if not texts:  # a tokenizer written in Python takes no empty list
            return Encoded(ids=[], encodings=None)
        if self._direct is not None and not positions:
            found = self._direct.encode_batch_fast(list(texts), add_special_tokens=False)
            return Encoded(ids=[one.ids for one in found], encodings=None)
        encoded = self._call(texts)
        return Encoded(ids=encoded["input_ids"], encodings=encoded.encodings)

    def special_token_in(self, text: str) -> str | None:
        """The first special token that is spelled out in a text, which encoding would make a real one."""
        found = self._special.search(text) if self._special else None
        return found[0] if found else None

    def _special_tokens(self) -> set[str]:
        added = self._tokenizer.added_tokens_decoder.values()
        marked = {token.content for token in added if token.special}
        return {
            token
            for token in {*self._tokenizer.all_special_tokens, *marked}
            if len(token) >= SHORTEST_SPECIAL
        }

    def _call(self, texts: Sequence[str]) -> Any:
        return self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # it would warn of texts longer than the model; their length is checked
        )

    def _find_direct(self) -> Any:
        """The `tokenizers` object inside, if it encodes as transformers' call does, else None.

        A tokenizer's own class may prepare its texts; it is asked with some that would show it.
        """
        if not self._tokenizer.is_fast:
            return None
        expected = self._call(PROBES)["input_ids"]  # it also clears truncation and padding
        direct = self._tokenizer.backend_tokenizer
        found = [one.ids for one in direct.encode_batch_fast(list(PROBES), add_special_tokens=False)]
        return direct if found == expected else None


class TemplateRefusedError(Exception):
    """A chat template does not take this conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A batch of encoded texts."""

    ids: list[list[int]]
    encodings: list[Any] | None
    """The `tokenizers` library's view with positions; None when they were not asked for, or come
    from a tokenizer written in Python."""

    def token_at(self, text: int, char: int) -> int | None:
        """How many tokens of text number `text` begin before this character; None if unknown.

        A token that spans the character begins before it.
        """
        if self.encodings is None:
            return None
        encoding = self.encodings[text]
        for at in range(char, char + 16):  # a normalizer may leave spaces without a token
            token = encoding.char_to_token(at)
            if token is not None:
                start, _ = encoding.token_to_chars(token)
                return int(token) + (1 if start < char else 0)
        return None


def _texts_of(template: Any) -> list[str]:
    """A tokenizer's templates: one, several by name, or none."""
    if isinstance(template, dict):
        return [text for text in template.values() if isinstance(text, str)]
    return [template] if isinstance(template, str) else []


def _any_of(words: set[str]) -> re.Pattern[str] | None:
    """Finds any of these words, the longest that fits; None for no words."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, longest_first))) if words else None
