"""A cluster for each file of tests, as the file's `SHAPE`, `LANES` and `STATES` say."""

from collections.abc import Iterator

import pytest

from tests.faults.trial import Trial, Trials


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    module = request.module
    made = Trials(
        tmp_path_factory.mktemp(module.__name__.rpartition(".")[2]),
        getattr(module, "SHAPE", None),
        lanes=getattr(module, "LANES", ("short",)),
        states=getattr(module, "STATES", "replay"),
    )
    yield made
    made.close()


@pytest.fixture
def trial(trials: Trials, request: pytest.FixtureRequest) -> Trial:
    return trials.next(request.node.name)
