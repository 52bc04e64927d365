"""Rows to messages or ids, checked against expectations written by hand."""

import numpy as np
import pytest

from producer.datasets.forms import Dropped, Form, Given, Reason, Shape, Talk, find_shape, parse

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    ("row", "form", "column"),
    [
        ({"id": 1, "prompt": "hi"}, Form.TEXT, "prompt"),
        ({"question": "hi", "answer": "ho"}, Form.TEXT, "question"),
        ({"messages": [USER, ANSWER]}, Form.MESSAGES, "messages"),
        ({"messages": '[{"role": "user", "content": "hi"}]'}, Form.MESSAGES, "messages"),
        ({"conversations": [USER]}, Form.CONVERSATIONS, "conversations"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, Form.CONVERSATIONS, "conversations"),
        ({"prompt": [USER]}, Form.MESSAGES, "prompt"),
        ({"turns": ["hi", "more"]}, Form.TURNS, "turns"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "text": "hi"}, Form.INPUT_IDS, "input_ids"),
        ({"instruction": "do", "input": "this"}, Form.TEXT, "instruction"),
    ],
)
def test_the_form_is_found_by_name_and_value(row: dict, form: Form, column: str) -> None:
    assert find_shape([row]) == Shape(form=form, column=column)


def test_a_row_without_a_known_column_leaves_the_finding_to_the_next() -> None:
    assert find_shape([{"x": 1}, {"prompt": None}, {"prompt": "hi"}]) == Shape(
        form=Form.TEXT, column="prompt"
    )
    assert find_shape([{"x": 1}]) is None


def test_a_first_row_with_nulls_does_not_decide_for_all_others() -> None:
    rows = [{"messages": None, "text": "hi"}, {"messages": [USER], "text": "hi"}]
    assert find_shape(rows) == Shape(form=Form.MESSAGES, column="messages")
    assert find_shape(reversed(rows)) == Shape(form=Form.MESSAGES, column="messages")


def test_the_manifest_may_name_column_and_form() -> None:
    row = {"prompt": "hi", "body": [USER]}
    assert find_shape([row], column="body") == Shape(form=Form.MESSAGES, column="body")
    assert find_shape([row], column="nobody") is None
    assert find_shape([row], form=Form.MESSAGES) is None
    named = find_shape([{"body": 5}, row], column="body", form=Form.CONVERSATIONS)
    assert named == Shape(form=Form.CONVERSATIONS, column="body")


TEXT = Shape(form=Form.TEXT, column="prompt")
TALK = Shape(form=Form.MESSAGES, column="messages")
IDS = Shape(form=Form.INPUT_IDS, column="input_ids")
TOOLS = {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("shape", "row", "messages"),
    [
        (TEXT, {"prompt": "hi"}, [USER]),
        (TALK, {"messages": [USER, ANSWER]}, [USER]),
        (TALK, {"messages": [USER, ANSWER, {"role": "user", "content": "more"}, ANSWER]},
         [USER, ANSWER, {"role": "user", "content": "more"}]),
        (TALK, {"messages": [{"role": "system", "content": "be"}, USER, ANSWER]},
         [{"role": "system", "content": "be"}, USER]),
        (TALK, {"messages": '[{"role": "user", "content": "hi"}]'}, [USER]),
        (TALK, {"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}, [USER]),
        (TALK, {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, "i"]}]},
         [USER]),
        (TALK, {"messages": [USER, {"role": "assistant", "content": None, **TOOLS},
                             {"role": "tool", "content": "5", "tool_call_id": "1"}, USER]},
         [USER, {"role": "assistant", "content": "", **TOOLS},
          {"role": "tool", "content": "5", "tool_call_id": "1"}, USER]),
        (TALK, {"messages": [{"role": "user", "content": "hi", "name": None}]}, [USER]),
        (TALK, {"messages": [{"role": None, "content": None, "from": "human", "value": "hi"}]}, [USER]),
        (Shape(form=Form.TURNS, column="turns"), {"turns": ["hi", "more"]}, [USER]),
        (Shape(form=Form.TEXT, column="instruction"), {"instruction": "do", "input": "this"},
         [{"role": "user", "content": "do\n\nthis"}]),
        (Shape(form=Form.TEXT, column="instruction"), {"instruction": "hi", "input": ""}, [USER]),
    ],
)  # fmt: skip
def test_a_row_becomes_all_up_to_its_last_user_turn(shape: Shape, row: dict, messages: list) -> None:
    assert parse(row, shape) == Talk(messages)


@pytest.mark.parametrize(
    ("shape", "row", "reason"),
    [
        (TEXT, ["hi"], Reason.NOT_OBJECT),
        (TEXT, {"question": "hi"}, Reason.NO_COLUMN),
        (TEXT, {"prompt": None}, Reason.NULL),
        (TEXT, {"prompt": 5}, Reason.WRONG_TYPE),
        (TEXT, {"prompt": " \n"}, Reason.EMPTY),
        (TALK, {"messages": "hi"}, Reason.WRONG_TYPE),
        (TALK, {"messages": "[1"}, Reason.WRONG_TYPE),
        (TALK, {"messages": ["hi"]}, Reason.WRONG_TYPE),
        (TALK, {"messages": []}, Reason.NO_USER),
        (TALK, {"messages": [ANSWER]}, Reason.NO_USER),
        (TALK, {"messages": [{"role": "narrator", "content": "hi"}, USER]}, Reason.ROLE),
        (TALK, {"messages": [{"content": "hi"}]}, Reason.ROLE),
        (TALK, {"messages": [{"role": "user", "content": None}]}, Reason.NULL),
        (TALK, {"messages": [{"role": "user", "content": {"a": 1}}]}, Reason.WRONG_TYPE),
        (TALK, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, Reason.NOT_TEXT),
        (Shape(form=Form.TURNS, column="turns"), {"turns": []}, Reason.EMPTY),
        (Shape(form=Form.TURNS, column="turns"), {"turns": "hi"}, Reason.WRONG_TYPE),
        (IDS, {"input_ids": []}, Reason.NO_TOKENS),
        (IDS, {"input_ids": ["a"]}, Reason.WRONG_TYPE),
        (IDS, {"input_ids": [1.5]}, Reason.WRONG_TYPE),
        (IDS, {"input_ids": [[1, 2], [3]]}, Reason.WRONG_TYPE),
        (IDS, {"input_ids": [1, 2], "loss_mask": [1]}, Reason.MASK_LENGTH),
        (IDS, {"input_ids": [1, 2], "loss_mask": [0, 0]}, Reason.MASK_EMPTY),
        (IDS, {"input_ids": [1, 2], "loss_mask": "01"}, Reason.WRONG_TYPE),
        # A mask of null would make all of the row an answer, its prompt too.
        (IDS, {"input_ids": [1, 2], "loss_mask": None}, Reason.NULL),
        # Labels, or weights, given as a mask: -100 is no answer.
        (IDS, {"input_ids": [1, 2], "loss_mask": [-100, 2]}, Reason.WRONG_TYPE),
    ],
)
def test_a_row_that_gives_no_prompt_says_why(shape: Shape, row: object, reason: Reason) -> None:
    found = parse(row, shape)
    assert isinstance(found, Dropped)
    assert found.reason is reason


def test_ids_come_with_their_mask_or_without() -> None:
    given = parse({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, IDS)
    assert isinstance(given, Given)
    assert given.ids.tolist() == [5, 6, 7]
    assert given.mask is not None
    assert given.mask.tolist() == [False, True, True]
    bare = parse({"input_ids": [5]}, IDS)
    assert isinstance(bare, Given)
    assert bare.mask is None
    assert bare.ids.dtype == np.int64
