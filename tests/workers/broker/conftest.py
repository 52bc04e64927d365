"""Fixtures of the broker's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from broker_stage import Stage, staged


@pytest.fixture
def stage(tmp_path: Path, redis_url: str) -> Iterator[Stage]:
    """A run without servers or workers yet."""
    with staged(tmp_path, redis_url) as stage:
        yield stage
