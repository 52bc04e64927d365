"""Compaction while sinks write and readers read, killed or not: nothing is lost, twice or torn."""

import pytest

from tests.faults import compacting
from tests.faults.books import visible
from tests.faults.trial import Trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_compaction_beside_sinks_and_readers_disturbs_neither(trial: Trial) -> None:
    trial.survives(lambda stage: None)
    trial.survives(compacting.beside_readers)
    assert any("merged" in path.name for path in visible(trial.cluster.out / "states" / "eagle3"))


def test_a_killed_compaction_loses_nothing_and_the_next_ends_it(trial: Trial) -> None:
    def kill(stage) -> None:
        for _ in range(6):
            compacting.killed(stage)
        assert compacting.start(stage.cluster).wait() == 0

    trial.survives(kill)
