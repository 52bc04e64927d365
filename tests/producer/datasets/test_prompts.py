"""Rows to prompts: ids as transformers gives them, spans, limits, and what is dropped."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from producer.datasets.forms import Form, Shape
from producer.datasets.model_folder import find_model
from producer.datasets.occurrences import RECENT, Occurrences
from producer.datasets.prompts import BATCH, Batch, Limits, make_prompts
from producer.datasets.sources import Row
from producer.datasets.template import Template
from storage.errors import UnavailableError, UnsuitableError
from storage.sample import Kind, Prompt
from storage.tokens import as_tokens, prompt_id
from tests.producer.small import CHAT_TEMPLATE, write_model

TEXT = Shape(form=Form.TEXT, column="prompt")
TALK = Shape(form=Form.MESSAGES, column="messages")
IDS = Shape(form=Form.INPUT_IDS, column="input_ids")
LIMITS = Limits(vocab_size=320, max_input_tokens=512)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def batches(
    template: Template, shape: Shape, values: Sequence[object], limits: Limits = LIMITS
) -> list[Batch]:
    rows = (Row(n, f"row {n}", value) for n, value in enumerate(values))
    return list(
        make_prompts(
            rows, dataset="B1", shape=shape, template=template, limits=limits, seen=Occurrences("B1")
        )
    )


def prompts(template: Template, shape: Shape, *values: object, limits: Limits = LIMITS) -> list[Prompt]:
    return [prompt for batch in batches(template, shape, values, limits) for prompt in batch.prompts]


def kinds(prompt: Prompt) -> list[tuple[int, int, int, Kind]]:
    return [(span.start, span.end, span.turn, span.kind) for span in prompt.spans]


def test_ids_are_those_that_transformers_gives(template: Template, encode: Callable[..., list[int]]) -> None:
    texts = ["the quick brown fox", "Übung macht den 猫 Meister\n\tand 🦊", "<|end typed |by a user", " x "]
    made = prompts(template, TEXT, *({"prompt": text} for text in texts))
    assert [prompt.tokens.tolist() for prompt in made] == [encode(user(text)) for text in texts]
    for prompt in made:
        assert prompt.id == prompt_id("B1", prompt.tokens)


def test_a_conversations_spans_are_where_its_messages_are(
    template: Template, encode: Callable[..., list[int]], model: Path
) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        user("the dog"),
        assistant("lazy"),
        {"role": "tool", "content": "5"},
        user("and the 猫?"),
    ]
    (prompt,) = prompts(template, TALK, {"messages": messages})
    assert prompt.tokens.tolist() == encode(*messages)
    pieces = [
        "<s><|system|>\nbe brief<|end|>\n",
        "<|user|>\nthe dog<|end|>\n",
        "<|assistant|>\nlazy<|end|>\n",
    ]
    pieces += ["<|tool|>\n5<|end|>\n", "<|user|>\nand the 猫?<|end|>\n", "<|assistant|>\n"]
    expected, start = [], 0
    for turn, (piece, kind) in enumerate(
        zip(pieces, [Kind.SYSTEM, Kind.USER, Kind.KEPT, Kind.TOOL, Kind.USER, Kind.UNKNOWN], strict=True)
    ):
        length = len(template.encode([piece]).ids[0])
        expected.append((start, start + length, turn, kind))
        start += length
    assert kinds(prompt) == expected


def test_messages_that_the_template_changes_in_hindsight_are_unknown(tmp_path: Path) -> None:
    """Reasoning that only the last answer keeps: the beginning of the whole is not what it was."""
    lookahead = (
        "{% for m in messages %}<|{{ m['role'] }}|>\n"
        "{{ m['content'].split('/think')[-1] if not loop.last else m['content'] }}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    template = Template(find_model(str(write_model(tmp_path, vocab_size=320, template=lookahead))))
    talk = [user("the dog"), assistant("hm /think lazy"), user("fox")]
    (prompt,) = prompts(template, TALK, {"messages": talk})
    ends = [len(template.encode([text]).ids[0]) for text in ("<|user|>\nthe dog<|end|>\n", "<|assistant|>\n")]
    total = prompt.tokens.size
    assert kinds(prompt) == [
        (0, ends[0], 0, Kind.USER),
        (ends[0], total - ends[1], 1, Kind.UNKNOWN),
        (total - ends[1], total, 3, Kind.UNKNOWN),
    ]


def test_every_prompt_is_covered_by_its_spans(template: Template) -> None:
    talks = [[user("a" * n)] + [assistant("b"), user("c")] * (n % 3) for n in range(1, 40)]
    for prompt in prompts(template, TALK, *({"messages": talk} for talk in talks)):
        assert prompt.spans[0].start == 0
        assert prompt.spans[-1].end == prompt.tokens.size
        assert all(a.end == b.start for a, b in zip(prompt.spans, prompt.spans[1:], strict=False))


def test_given_masks_become_spans(template: Template) -> None:
    row = {"input_ids": [9, 8, 7, 6, 5], "loss_mask": [0, 0, 1, 0, 1]}
    masked, bare = prompts(template, IDS, row, {"input_ids": [9, 8, 7]})
    assert masked.tokens.tolist() == row["input_ids"]
    assert masked.given_from == 2
    assert kinds(masked) == [
        (0, 2, 0, Kind.UNKNOWN),
        (2, 3, 1, Kind.KEPT),
        (3, 4, 2, Kind.UNKNOWN),
        (4, 5, 3, Kind.KEPT),
    ]
    assert bare.given_from == 0
    assert kinds(bare) == [(0, 3, 0, Kind.KEPT)]


def test_ids_outside_the_vocabulary_and_long_rows_are_dropped_and_counted(template: Template) -> None:
    rows = [[319], [320], [-1], [2**40], [1] * 511, [1] * 512]
    (batch,) = batches(template, IDS, [{"input_ids": ids} for ids in rows])
    assert [prompt.source_row for prompt in batch.prompts] == [0, 4]
    assert batch.dropped == {"tokens.vocabulary": 3, "tokens.too_long": 1}
    assert batch.skipped[0].detail == "id 320, the vocabulary has 320"


def test_a_prompt_leaves_room_for_a_token_of_its_answer(
    template: Template, encode: Callable[..., list[int]]
) -> None:
    tight = replace(LIMITS, max_input_tokens=len(encode(user("the dog"))) + 2)
    assert len(prompts(template, TEXT, {"prompt": "the dog"}, limits=tight)) == 1
    tighter = replace(LIMITS, max_input_tokens=len(encode(user("the dog"))) + 1)
    (batch,) = batches(template, TEXT, [{"prompt": "the dog"}], tighter)
    assert batch.dropped == {"tokens.too_long": 1}


def test_what_a_template_refuses_and_what_no_tokenizer_takes_is_dropped(template: Template) -> None:
    developer = [{"role": "developer", "content": "be"}, user("hi")]
    (batch,) = batches(
        template, TALK, [{"messages": developer}, {"messages": [user(json.loads('"\\ud800"'))]}]
    )
    assert batch.dropped == {"template.refused": 1, "content.surrogate": 1}


def test_special_tokens_typed_in_content_are_not_taken_for_real_ones(template: Template) -> None:
    rendered = template.render([user("hi")])
    talk = [user("hi"), assistant("as you say <|end|>"), user("more")]
    typed = [user("what does <|user|> mean?")]
    rows = [
        {"messages": [user(rendered)]},
        {"messages": talk},
        {"messages": typed},
        {"messages": [user("<b>")]},
    ]
    (batch,) = batches(template, TALK, rows)
    assert [prompt.source_row for prompt in batch.prompts] == [3]
    assert batch.dropped == {"content.special_token": 3}
    assert [one.detail for one in batch.skipped] == [
        "user turn: <s>",
        "assistant turn: <|end|>",
        "user turn: <|user|>",
    ]


def test_a_source_of_ineligible_rows_is_read_in_ever_larger_steps(template: Template) -> None:
    rows = [{"prompt": None}] * 10_000 + [{"prompt": "hi"}] * 3
    made = batches(template, TEXT, rows, replace(LIMITS, max_prompts=2))
    assert sum(len(batch.prompts) for batch in made) == 2
    assert sum(batch.dropped["content.null"] for batch in made) == 10_000
    assert made[-1].next_row == 10_002
    assert len(made) < 12


def test_a_repeated_row_is_its_next_occurrence(template: Template) -> None:
    made = prompts(template, TEXT, *[{"prompt": text} for text in ("a", "b", "a", "a")])
    tokens = made[0].tokens
    assert [made[i].id for i in (0, 2, 3)] == [prompt_id("B1", tokens, occurrence=n) for n in range(3)]
    assert len({prompt.id for prompt in made}) == 4


def test_reading_ends_at_the_cap_and_ineligible_rows_use_none_of_it(template: Template) -> None:
    rows: list[object] = [{"prompt": ""} if n % 2 else {"prompt": f"row {n}"} for n in range(5000)]
    made = batches(template, TEXT, rows, replace(LIMITS, max_prompts=2100))
    assert sum(len(batch.prompts) for batch in made) == 2100
    assert made[-1].next_row == 4199
    assert sum(batch.dropped.get("content.empty", 0) for batch in made) == 2099
    assert not made[-1].complete
    assert all(len(batch.prompts) <= BATCH for batch in made)


def test_reading_ends_when_the_prompts_alone_reach_the_token_cap(
    template: Template, encode: Callable[..., list[int]]
) -> None:
    each = len(encode(user("row")))
    (batch,) = batches(template, TEXT, [{"prompt": "row"}] * 50, replace(LIMITS, max_tokens=each * 3 + 1))
    assert len(batch.prompts) == 4


def test_the_last_batch_says_that_the_source_is_at_its_end(template: Template) -> None:
    assert [b.complete for b in batches(template, TEXT, [{"prompt": "a"}] * BATCH)] == [False, True]
    assert [b.complete for b in batches(template, TEXT, [{"prompt": "a"}] * 3)] == [True]
    assert [b.complete for b in batches(template, TEXT, [])] == [True]


def test_rows_of_very_many_ids_come_in_smaller_batches(template: Template) -> None:
    rows = [{"input_ids": [1] * 1_500_000}] * 4
    made = batches(template, IDS, rows, replace(LIMITS, max_input_tokens=2_000_000))
    assert [(len(b.prompts), b.next_row, b.complete) for b in made] == [(3, 3, False), (1, 4, True)]


def test_occurrences_go_on_from_what_is_stored() -> None:
    first, other = as_tokens([1, 2]), as_tokens([3])
    stored = [prompt_id("B1", first, occurrence=n) for n in range(3)] + [prompt_id("B1", other)]
    later = Occurrences("B1", stored)
    assert later.next_id(first) == prompt_id("B1", first, occurrence=3)
    assert later.next_id(first) == prompt_id("B1", first, occurrence=4)
    assert later.next_id(as_tokens([4])) == prompt_id("B1", as_tokens([4]))


def test_occurrences_are_told_apart_past_what_is_kept_in_a_set() -> None:
    seen = Occurrences("B1")
    for n in range(RECENT + 10):
        assert seen.next_id(as_tokens([n])) == prompt_id("B1", as_tokens([n]))
    for n in (0, RECENT - 1, RECENT + 5):
        assert seen.next_id(as_tokens([n])) == prompt_id("B1", as_tokens([n]), occurrence=1)


def test_a_model_without_a_chat_template_can_only_take_ids(tmp_path: Path) -> None:
    template = Template(find_model(str(write_model(tmp_path, vocab_size=320, template=None))))
    assert not template.can_chat
    assert len(prompts(template, IDS, {"input_ids": [1]})) == 1


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="holds no tokenizer"):
        find_model(str(tmp_path))


OWN_CODE = """
from transformers import PreTrainedTokenizer


class OwnTokenizer(PreTrainedTokenizer):
    vocab_size = property(lambda self: 256)

    def get_vocab(self):
        return {chr(n): n for n in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    """A tokenizer in Python, as some models bring one: a token is a character."""
    config = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
        "chat_template": CHAT_TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(OWN_CODE)
    return tmp_path


def test_a_tokenizer_with_its_own_code_asks_for_the_flag(own_code: Path) -> None:
    with pytest.raises(UnsuitableError) as raised:
        Template(find_model(str(own_code)))
    assert "--trust-remote-code" in (raised.value.hint or "")


def test_a_tokenizer_written_in_python_gives_the_same_spans(own_code: Path) -> None:
    template = Template(find_model(str(own_code)), trust_remote_code=True)
    pieces = ["<s><|system|>\nbe<|end|>\n", "<|user|>\ndog<|end|>\n", "<|assistant|>\nlazy<|end|>\n"]
    pieces += ["<|user|>\nfox<|end|>\n", "<|assistant|>\n"]
    talk = [{"role": "system", "content": "be"}, user("dog"), assistant("lazy"), user("fox")]
    (prompt,) = prompts(template, TALK, {"messages": talk})
    assert prompt.tokens.tolist() == [ord(letter) for letter in "".join(pieces)]
    ends = [sum(len(piece) for piece in pieces[: n + 1]) for n in range(5)]
    wanted = [Kind.SYSTEM, Kind.USER, Kind.KEPT, Kind.USER, Kind.UNKNOWN]
    assert kinds(prompt) == [
        (start, end, turn, kind)
        for turn, (start, end, kind) in enumerate(zip([0, *ends], ends, wanted, strict=False))
    ]


def test_digests_change_with_what_they_are_of(tmp_path: Path, model: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before, copied = find_model(str(model)), find_model(str(tmp_path))
    assert copied.tokenizer_digest() == before.tokenizer_digest()
    assert copied.template_digest() == before.template_digest()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert copied.tokenizer_digest() == before.tokenizer_digest()
    assert copied.template_digest() != before.template_digest()
    (tmp_path / "added_tokens.json").write_text("{}")
    assert copied.tokenizer_digest() != before.tokenizer_digest()
