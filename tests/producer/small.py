"""What these tests are made of: a small target, an engine, prompt files."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from producer.machine.redis_server import free_port

CHAT_TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL = ["<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEXTS = ["the quick brown fox jumps over the lazy dog", "what is two and two? four, of course.", "Übung 猫"]


def write_model(
    folder: Path,
    *,
    vocab_size: int,
    template: str | None = CHAT_TEMPLATE,
    more_tokens: int = 0,
    model_vocab_size: int = 2000,
    context: int = 512,
) -> Path:
    """A tokenizer trained on a few words, with a chat template and a model's sizes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([f"@{n}@" for n in range(more_tokens)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    config = {"num_hidden_layers": 8, "hidden_size": 64, "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": model_vocab_size}))
    return folder


def engine(folder: Path, *arguments: str) -> Iterator[str]:
    """The embedded engine on a free port; its address."""
    port = free_port()
    with (folder / "engine.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.engine", "--port", str(port), *arguments],
            env={**os.environ, "EYAS_SPOOL_DIR": str(folder / "spool"), "EYAS_NODE": "test"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _ready(url):
            assert process.poll() is None, (folder / "engine.log").read_text()
        yield url
    finally:
        process.kill()
        process.wait()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
            return reply.status == 200
    except urllib.error.HTTPError as refused:
        refused.close()
        return False
    except OSError:
        return False


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


Cli = Callable[..., Ended]


def write_lines(path: Path, rows: Sequence[object]) -> Path:
    """JSONL; a row that is a `str` is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
