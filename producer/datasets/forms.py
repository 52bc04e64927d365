"""Forms: what a row holds and how it becomes messages or token ids.

Found by itself from a column's name and values, or named in the manifest. Until a manifest can say
otherwise, a conversation gives everything up to its last user turn and `turns` its first turn.
Nothing here renders or tokenizes (`template.py`); what cannot be used comes back as `Dropped`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.json_records import parse_json


class Form(StrEnum):
    """What the column of a row holds."""

    TEXT = "text"
    """One user turn."""
    MESSAGES = "messages"
    """A list of turns with `role` and `content`."""
    CONVERSATIONS = "conversations"
    """The same under another name, or with `from` and `value`."""
    TURNS = "turns"
    """The texts of a user's turns."""
    INPUT_IDS = "input_ids"
    """Token ids, their answer included; `loss_mask` beside them says where answers are."""


class Reason(StrEnum):
    """Why a row gives no prompt; only ever added to, never renamed."""

    BROKEN_JSON = "json.broken"
    NOT_OBJECT = "row.not_object"
    NO_COLUMN = "row.no_column"
    WRONG_TYPE = "content.type"
    NULL = "content.null"
    NOT_TEXT = "content.not_text"
    """Images, audio and other parts that are no text."""
    EMPTY = "content.empty"
    SURROGATE = "content.surrogate"
    """Half a UTF-16 pair: no tokenizer takes it."""
    SPECIAL = "content.special_token"
    """A special token spelled out, as in a prompt that is rendered already: it would become a real one."""
    ROLE = "role.unknown"
    NO_USER = "turns.no_user"
    TEMPLATE = "template.refused"
    NO_TOKENS = "tokens.empty"
    VOCABULARY = "tokens.vocabulary"
    TOO_LONG = "tokens.too_long"
    MASK_LENGTH = "mask.length"
    MASK_EMPTY = "mask.empty"


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row without a prompt."""

    reason: Reason
    detail: str = ""
    """What exactly, never the row's text."""


@dataclass(frozen=True, slots=True)
class Talk:
    """Messages that end in a user turn, as a chat template takes them."""

    messages: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Given:
    """Token ids with their answer."""

    ids: NDArray[np.int64]
    """[T]."""
    mask: NDArray[np.bool_] | None
    """[T], true where an answer is; None when the row does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Where to look in a row and what is there."""

    form: Form
    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that `parse` reads."""
        beside = {Form.INPUT_IDS: (MASK,), Form.TEXT: (INPUT,) if self.column == INSTRUCTION else ()}
        return (self.column, *beside.get(self.form, ()))


MASK = "loss_mask"
INSTRUCTION, INPUT = "instruction", "input"
"""Alpaca's pair: the second column is what the first speaks of, so it is appended."""
COLUMNS = (
    "input_ids",
    *("messages", "conversations", "conversation", "turns"),
    *("prompt", "question", INSTRUCTION, "problem", "query", "text", INPUT),
)
"""Columns known by name; of several in one row the first counts."""
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function")},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
}


def find_shape(
    rows: Iterable[Mapping[str, Any]], *, column: str | None = None, form: Form | None = None
) -> Shape | None:
    """The shape that these rows have; None when none does.

    `column` and `form` are what the manifest names. A column known by name counts before those
    that come later in `COLUMNS` even where only some rows fill it: what it then drops is counted,
    what another column would give in its place is not.
    """
    looked_at = list(rows)
    for name in (column,) if column else COLUMNS:
        for value in (row.get(name) for row in looked_at):
            found = _form_of(value, name)
            if found is not None and form in (None, found):
                return Shape(form=found, column=name)
            if column and form and value is not None:
                return Shape(form=form, column=name)
    return None


def parse(row: Any, shape: Shape) -> Talk | Given | Dropped:
    """What this row holds."""
    if not isinstance(row, Mapping):
        return Dropped(Reason.NOT_OBJECT, type(row).__name__)
    if shape.column not in row:
        return Dropped(Reason.NO_COLUMN, shape.column)
    value = row[shape.column]
    match shape.form:
        case Form.TEXT:
            if shape.column == INSTRUCTION and isinstance(row.get(INPUT), str) and row[INPUT].strip():
                value = f"{value}\n\n{row[INPUT]}" if isinstance(value, str) else value
            return _talk([("user", value, {})])
        case Form.TURNS:
            if not isinstance(value, Sequence) or isinstance(value, str):
                return Dropped(Reason.WRONG_TYPE, type(value).__name__)
            return _talk([("user", value[0], {})]) if value else Dropped(Reason.EMPTY)
        case Form.MESSAGES | Form.CONVERSATIONS:
            return _conversation(value)
        case Form.INPUT_IDS:
            if MASK in row and row[MASK] is None:
                # without one all of the row would count as answer, its prompt too
                return Dropped(Reason.NULL, MASK)
            return _given(value, row.get(MASK))


def _form_of(value: Any, column: str) -> Form | None:
    conversation = Form.CONVERSATIONS if column.startswith("conversation") else Form.MESSAGES
    match value:
        case str():
            return conversation if _is_json_list(value) and column.startswith(("mess", "conv")) else Form.TEXT
        case [int(), *_]:
            return Form.INPUT_IDS
        case [str(), *_]:
            return Form.TURNS
        case [{"from": _}, *_]:
            return Form.CONVERSATIONS
        case [{"role": _}, *_]:
            return conversation
        case _:
            return None


def _is_json_list(text: str) -> bool:
    return text.lstrip().startswith("[")


def _conversation(value: Any) -> Talk | Dropped:
    if isinstance(value, str) and _is_json_list(value):
        try:
            value = parse_json(value)
        except ValueError:
            return Dropped(Reason.WRONG_TYPE, "a JSON string that is none")
    if not isinstance(value, Sequence) or isinstance(value, str):
        return Dropped(Reason.WRONG_TYPE, type(value).__name__)
    turns = []
    for turn in value:
        if not isinstance(turn, Mapping):
            return Dropped(Reason.WRONG_TYPE, f"a turn is {type(turn).__name__}")
        named = _either(turn, "role", "from")
        role = ROLES.get(named.lower()) if isinstance(named, str) else None
        if role is None:
            return Dropped(Reason.ROLE, named[:40] if isinstance(named, str) else type(named).__name__)
        # Parquet fills what a turn does not have with nulls; templates ask `is defined`.
        rest = {
            key: content
            for key, content in turn.items()
            if key not in ("role", "from", "content", "value") and content is not None
        }
        turns.append((role, _either(turn, "content", "value"), rest))
    last_user = max((i for i, (role, _, _) in enumerate(turns) if role == "user"), default=None)
    if last_user is None:
        return Dropped(Reason.NO_USER)
    return _talk(turns[: last_user + 1])


def _either(turn: Mapping[str, Any], name: str, other: str) -> Any:
    """What is under one of the names; Parquet may hold both in every turn, one of them null."""
    value = turn.get(name)
    return turn.get(other) if value is None else value


def _talk(turns: list[tuple[str, Any, dict[str, Any]]]) -> Talk | Dropped:
    messages = []
    for role, content, rest in turns:
        if isinstance(content, list):
            content = _joined_parts(content)
            if content is None:
                return Dropped(Reason.NOT_TEXT)
        if content is None and role in ("assistant", "tool", "function") and rest:
            content = ""  # a tool call says nothing beside it
        if content is None:
            return Dropped(Reason.NULL, role)
        if not isinstance(content, str):
            return Dropped(Reason.WRONG_TYPE, f"{role} turn is {type(content).__name__}")
        messages.append({"role": role, "content": content, **rest})
    if not messages[-1]["content"].strip():
        return Dropped(Reason.EMPTY)
    return Talk(messages)


def _joined_parts(parts: list[Any]) -> str | None:
    """The text of content given in parts; None when a part is no text."""
    texts = []
    for part in parts:
        match part:
            case str():
                texts.append(part)
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                return None
    return "".join(texts)


def _given(value: Any, mask: Any) -> Given | Dropped:
    ids = _integers(value)
    if ids is None:
        return Dropped(Reason.WRONG_TYPE, "ids are not a list of whole numbers")
    if not ids.size:
        return Dropped(Reason.NO_TOKENS)
    if mask is None:
        return Given(ids, None)
    ones = _integers(mask)
    if ones is not None and ones.size != ids.size:
        return Dropped(Reason.MASK_LENGTH, f"{ones.size} for {ids.size} ids")
    if ones is None or ones.min() < 0 or ones.max() > 1:
        return Dropped(Reason.WRONG_TYPE, "the mask is not a list of 0 and 1")
    if not ones.any():
        return Dropped(Reason.MASK_EMPTY)
    return Given(ids, ones != 0)


def _integers(value: Any) -> NDArray[np.int64] | None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal length inside
        return None
    if not array.size:
        return array.astype(np.int64).reshape(-1)
    # ids past int64 come as objects or unsigned; both are outside any vocabulary, not another type
    if array.ndim != 1 or array.dtype.kind not in "bi":
        return None
    return array.astype(np.int64)
