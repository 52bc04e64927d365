"""Fixtures of these tests: a supervisor in a folder of its own, and nothing of it left afterwards."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.producer.machine.supervised import Supervised


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    it = Supervised(tmp_path / "state", token=os.urandom(16).hex())
    yield it
    for process in it.marked():
        process.kill()
    if it.process is not None:
        it.process.wait()
