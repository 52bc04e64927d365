"""What the soak decides before and after its faults: the schedule by the seed, and what is growth."""

from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

from tests.faults.fault import Fault
from tests.faults.gauges import Gauges, Reading
from tests.faults.plot import draw
from tests.faults.schedule import schedule

FAULTS = [Fault(kind=f"kind{n}", victim=f"v{n}", run=lambda stage: None) for n in range(12)]


def names(seed: int) -> list[tuple[list[str], int]]:
    return [([str(f) for f in drawn.faults], drawn.seed) for drawn in islice(schedule(FAULTS, seed), 60)]


def test_the_same_seed_draws_the_same_faults_and_another_draws_others() -> None:
    assert names(7) == names(7)
    assert names(7) != names(8)


def test_every_fault_comes_once_before_any_comes_again() -> None:
    first = [drawn.faults[0] for drawn in islice(schedule(FAULTS, 3), len(FAULTS))]
    assert {fault.kind for fault in first} == {fault.kind for fault in FAULTS}


def readings(value, minutes: int = 30) -> list[Reading]:
    return [
        Reading(at_s=at, process="sink", pid=1, what="rss_mb", value=value(at))
        for at in range(0, 60 * minutes, 5)
    ]


def slope(found: list[Reading]) -> bool:
    gauges = Gauges.__new__(Gauges)
    gauges.readings = found
    (only,) = gauges.slopes()
    return only.is_flat


def test_a_leak_grows_and_a_step_or_a_warm_up_does_not() -> None:
    assert not slope(readings(lambda at: 100 + 80 * at / 3600))
    assert slope(readings(lambda at: 100 + 30 * (at > 700)))
    assert slope(readings(lambda at: min(120, 60 + at / 5)))
    assert slope(readings(lambda at: 100 + at % 7))


def test_the_plot_is_a_picture_with_a_line_for_each_life(tmp_path: Path) -> None:
    found = [
        *readings(lambda at: 100.0),
        Reading(at_s=900, process="sink", pid=2, what="rss_mb", value=60.0),
        Reading(at_s=0, process="redis", pid=0, what="redis_mb", value=3.0),
    ]
    draw(found, "a < b", tmp_path / "soak.svg")
    root = ElementTree.parse(tmp_path / "soak.svg").getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 3
