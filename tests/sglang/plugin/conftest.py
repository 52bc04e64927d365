"""One environment for all servers of these tests."""

import pytest

from tests.sglang.environment.build import find_or_build


@pytest.fixture(scope="session")
def environment():
    return find_or_build()
