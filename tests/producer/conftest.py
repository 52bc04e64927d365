"""A small target made in this process, a running engine, and the command as a person types it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Before a `Template` freezes the garbage collector, in which it looks for what it would warn of.
import hypothesis  # noqa: F401
import pytest
from transformers import AutoTokenizer

from producer.cli import producer
from producer.datasets.model_folder import find_model
from producer.datasets.template import Template
from storage.cli_errors import run_command
from tests.producer.enqueuing import Enqueue
from tests.producer.small import Cli, Ended, engine, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), vocab_size=320)


@pytest.fixture(scope="session")
def template(model: Path) -> Template:
    return Template(find_model(str(model)))


@pytest.fixture(scope="session")
def encode(model: Path) -> Callable[..., list[int]]:
    """What transformers itself makes of a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(*messages: dict[str, str]) -> list[int]:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )

    return ids


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def server_without_states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from engine(tmp_path_factory.mktemp("engine"), "--states", "off")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`producer …` in a folder of its own, with no variable set."""
    for name in list(os.environ):
        if name.startswith("EYAS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("EYAS_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Ended:
        capsys.readouterr()
        status = run_command(producer, "producer", [str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Ended(status, said.out, said.err)

    return run


@pytest.fixture
def enqueue(cli: Cli, redis_url: str, server: str) -> Enqueue:
    """`producer enqueue` with Redis, server and folder given."""

    def run(*arguments: str | Path) -> Ended:
        where = ("--redis-url", redis_url, "--server-url", server, "--output-dir", "out")
        return cli("enqueue", *where, *arguments)

    return run
