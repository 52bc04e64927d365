"""Disks full, spools wiped, the output folder away: the run pauses, says so, and goes on by itself."""

import pytest

from tests.faults import full_disks
from tests.faults.cluster import HURRIED, Shape, until
from tests.faults.fault import Stage
from tests.faults.trial import Trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SHAPE = Shape(timing=HURRIED, spool_mb=64, store_mb=256)


def test_a_full_store_pauses_the_sink_and_loses_nothing(trial: Trial) -> None:
    needs_small(trial)

    def full(stage: Stage) -> None:
        stage.cluster.disk.fill()
        until(lambda: says(trial, "sink"), "the sink says that it waits")
        stage.cluster.disk.empty()

    trial.survives(full)


def test_a_full_spool_pauses_the_captures_and_loses_nothing(trial: Trial) -> None:
    needs_small(trial)

    def full(stage: Stage) -> None:
        node = stage.cluster.nodes[0]
        node.disk.fill()
        until(lambda: says(trial, "capture"), "the lane says that it waits")
        node.disk.empty()

    trial.survives(full)


def test_states_whose_spool_files_are_wiped_are_captured_again(trial: Trial) -> None:
    trial.survives(full_disks.wipe(1))


def test_a_spool_folder_that_was_removed_is_made_anew(trial: Trial) -> None:
    trial.survives(full_disks.remove(1))


def test_an_output_folder_that_goes_away_is_waited_for_and_not_made_anew(trial: Trial) -> None:
    trial.survives(full_disks.away(10))


def needs_small(trial: Trial) -> None:
    if not trial.cluster.disk.is_small:
        pytest.skip("filling a disk needs one of its own: mounting a tmpfs takes root")


def says(trial: Trial, lane: str) -> str:
    """What a process of this lane says when it is paused."""
    seen = trial.cluster.glance()
    return next(
        (p.says for p in (seen.processes if seen else ()) if p.lane == lane and p.state == "paused"), ""
    )
