"""The Throughput page in a real Chromium while a real job runs, from its first minute to its end.

The tests follow one job in their order. `EYAS_PICTURES=docs/pictures` keeps the pictures.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.browser.agreement import check_agreement
from tests.browser.conftest import Browser
from tests.browser.job import SAMPLES, SECRET, Job, running_job
from tests.workers.flower.flower_process import running_flower

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]
LARGEST_BYTES = 200_000
SEEN = "window.seenBefore = true"


@pytest.fixture(scope="module")
def job(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Begun only when there is a browser to watch it."""
    with running_job(tmp_path_factory.mktemp("job")) as job:
        browser.look(width=1400)
        browser.open(job.flower.url + "/throughput")
        browser.run(SEEN)
        yield job


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go."""
    told = os.environ.get("EYAS_PICTURES")
    folder = Path(told) if told else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def number(text: str) -> int:
    """The first whole number in a text: `1 080 of 7 000` → 1080."""
    found = re.search(r"\d[\d ]*", text)
    assert found, text
    return int(found[0].replace(" ", ""))


def done(browser: Browser) -> int:
    """Samples done as the page shows it; 0 before it knows."""
    said = browser.text("#tp-progress")
    return number(said) if any(map(str.isdigit, said)) else 0


def lines_of(browser: Browser, title: str) -> int:
    """Lines drawn in the chart of this title."""
    return browser.run(
        "return [...document.querySelectorAll('.tp-chart')]"
        f".filter((one) => one.querySelector('.tp-chart-title').textContent === {json.dumps(title)})"
        ".flatMap((one) => [...one.querySelectorAll('.tp-line')]).length"
    )


def test_the_figures_are_those_of_status(browser: Browser, job: Job) -> None:
    """What only grows lies between what the page says before and after."""
    job.until(lambda status: status["done"] >= 20)
    browser.until(lambda: done(browser) >= 20, "progress")
    before = (done(browser), browser.rows("tp-datasets"))
    status = job.status()
    browser.until(lambda: done(browser) >= status["done"], "the page follows")
    after = (done(browser), browser.rows("tp-datasets"))
    assert before[0] <= status["done"] <= after[0] + 1
    wanted = {dataset["name"]: dataset for dataset in status["datasets"]}
    assert [row[0].split("\n")[0] for row in after[1]] == list(wanted)
    for early, late in zip(before[1], after[1], strict=True):
        dataset = wanted[late[0].split("\n")[0]]
        assert number(late[2]) == dataset["wanted"] == SAMPLES[dataset["name"]]
        assert number(early[3]) <= dataset["generated"] <= number(late[3])
        assert number(early[4]) <= dataset["stored"] <= number(late[4])
    assert browser.text("#tp-run").startswith(f"run {status['run_id'][:8]} · ")
    limits = {lane["name"]: lane["limit"] for lane in status["lanes"]}
    assert limits == {"short": 48, "long": 12, "capture": 24}
    shown = {row[0] for row in browser.rows("tp-lanes") if row[0]}
    assert shown == set(limits)
    assert len(browser.rows("tp-lanes")) == 3
    servers = browser.rows("tp-servers")
    assert [row[0].split("\n")[0] for row in servers] == [server["url"] for server in status["servers"]]
    assert all(row[1].startswith("up") for row in servers)
    for row in servers:
        places = dict(re.findall(r"(\w+) \d+ of (\d+)", row[2]))
        assert places == {"short": "24", "long": "6", "capture": "12"}


def test_it_changes_without_being_loaded_again(browser: Browser, job: Job) -> None:
    now = done(browser)
    browser.until(lambda: done(browser) > now + 5, "more samples")
    assert browser.run("return window.seenBefore") is True
    browser.until(lambda: lines_of(browser, "Tokens") == 3, "speeds of output, prompt and capture")
    browser.until(lambda: "tok/s" in browser.text("#tp-output"), "the speed is known")
    assert browser.text("#tp-live").startswith("Live")


def test_every_figure_of_a_running_job_is_known(browser: Browser, job: Job) -> None:
    """No dash is left where there is something to know."""
    job.until(lambda status: status["left_s"] is not None and status["stored_bytes"])
    cards = (
        "output",
        "samples",
        "progress",
        "left",
        "flight",
        "truncated",
        "failed",
        "wasted",
        "spool",
        "stored",
    )
    for card in cards:
        browser.until(lambda card=card: re.search(r"\d", browser.text(f"#tp-{card}")), card)
    for title, fewest in {"In flight": 6, "Waiting": 3, "KV cache": 2, "Spool": 1, "Samples": 1}.items():
        browser.until(lambda title=title, n=fewest: lines_of(browser, title) >= n, title)
    used = [row[4] for row in browser.rows("tp-servers")]
    assert all(re.search(r"\d %", share) for share in used)
    (sink,) = browser.rows("tp-sinks")
    assert sink[1].startswith("running")
    assert sink[5].endswith("GB")
    assert browser.rows("tp-failures") == [["None."]]


def test_pictures_are_taken_of_the_job(browser: Browser, job: Job, pictures: Path) -> None:
    job.until(lambda status: status["done"] >= 0.45 * status["wanted"])
    browser.picture(pictures / "throughput.png", width=1400, height=1066)
    browser.look(width=400)
    browser.picture(pictures / "throughput-narrow.png", width=400, height=1500)
    browser.look(width=1400, dark=True)
    browser.picture(pictures / "throughput-dark.png", width=1400, height=1060)
    browser.look(width=1400)
    browser.open(job.flower.url + "/tasks")
    browser.until(lambda: len(browser.rows("tasks-table")) > 8, "tasks")
    browser.picture(pictures / "tasks.png", width=1400, height=760)
    browser.look(width=1400)
    browser.open(job.flower.url + "/throughput")
    browser.until(lambda: done(browser), "the page is back")
    for picture in pictures.glob("*.png"):
        assert 10_000 < picture.stat().st_size < LARGEST_BYTES, picture


@pytest.mark.parametrize("width", [360, 400, 768, 1024])
def test_nothing_is_wider_than_the_window(browser: Browser, job: Job, width: int) -> None:
    browser.look(width=width)
    overflow = """
        const out = [...document.querySelectorAll(".tp-page *")].filter((one) =>
            !one.closest(".tp-scroll, svg") && getComputedStyle(one).position !== "absolute"
            && one.getBoundingClientRect().right > innerWidth + 1);
        return [document.documentElement.scrollWidth <= innerWidth, out.map((one) => one.className)];
    """
    browser.until(lambda: browser.run("return innerWidth") == width, "the width")
    assert browser.run(overflow) == [True, []]
    browser.look(width=1400)


def test_dark_is_the_systems_wish_or_flowers_switch(browser: Browser, job: Job) -> None:
    def light() -> int:
        colour = browser.run("return getComputedStyle(document.querySelector('.tp-chart')).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    assert light() == 3 * 255
    browser.look(width=1400, dark=True)
    browser.until(lambda: light() < 150, "dark")
    browser.look(width=1400)
    browser.until(lambda: light() == 3 * 255, "light again")
    browser.run("document.querySelector('[data-bs-theme-value=dark]').click()")
    browser.until(lambda: light() < 150, "dark by the switch")
    browser.run("document.querySelector('[data-bs-theme-value=system]').click()")


def test_charts_are_read_by_keyboard_and_as_tables(browser: Browser, job: Job) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    chart = browser.driver.find_element(By.CSS_SELECTOR, ".tp-chart")
    svg = chart.find_element(By.CSS_SELECTOR, ".tp-svg")
    browser.until(lambda: "output" in svg.get_attribute("aria-label"), "a text for the chart")
    browser.run("document.querySelector('.tp-svg').focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    browser.until(lambda: "output" in browser.text(".tp-tip"), "values at the cursor")
    browser.driver.switch_to.active_element.send_keys(Keys.END)
    spoken = browser.run("return document.querySelector('.tp-chart [aria-live]').textContent")
    assert re.search(r"\d\d:\d\d:\d\d .*output \d", spoken), spoken
    browser.run("document.querySelector('.tp-details').open = true")
    browser.until(lambda: "tok/s" in browser.text(".tp-scroll tbody"), "the table")
    browser.run("document.querySelector('.tp-details').open = false")
    unnamed = browser.run(
        "return [...document.querySelectorAll('.tp-page button, .tp-page section, .tp-page svg.tp-svg')]"
        ".filter((one) => !one.textContent.trim() && !one.getAttribute('aria-label')).length"
    )
    assert unnamed == 0


def test_flowers_task_list_is_readable_and_shows_no_prompt(job: Job) -> None:
    path = (
        "/tasks/datatable?draw=1&start=0&length=3000&search[value]=&order[0][column]=0&order[0][dir]=asc"
        "&columns[0][data]=name"
    )
    answer = job.flower.get(path).text
    tasks = json.loads(answer)["data"]
    assert len(tasks) > 50
    assert {task["name"] for task in tasks} == {"generate.short", "generate.long", "capture", "store"}
    results = {
        "generate.short": r"\d+ tok · \d+ tok/s · (stop|length)",
        "generate.long": r"\d+ tok · \d+ tok/s · (stop|length)",
        "capture": r"\d+ rows × \d layers · [\d.]+ [kM]B",
        "store": "stored",
    }
    for task in tasks:
        assert re.fullmatch(r"(B1|B2|B5|A1) · \d+ (tok|rows)", task["args"]), task["args"]
        if task["state"] == "SUCCESS":
            assert re.fullmatch(results[task["name"]], task["result"]), task
    assert SECRET not in answer
    assert SECRET not in job.flower.log.read_text()


def test_a_restart_of_flower_keeps_the_history(browser: Browser, job: Job) -> None:
    past = json.loads(job.flower.get("/throughput/history?span=0").text)
    browser.run(SEEN)
    job.flower.process.kill()
    job.flower.process.wait()
    browser.until(lambda: "does not answer" in browser.text("#tp-live"), "Flower is missed")
    with running_flower(job.folder, job.redis_url, port=job.flower.port) as flower:
        again = json.loads(flower.get("/throughput/history?span=0").text)
        assert again["from"] == past["from"]
        assert len(again["times"]) >= len(past["times"]) > 5
        browser.until(lambda: browser.text("#tp-live").startswith("Live"), "Flower is back")
        assert browser.run("return window.seenBefore") is True
        _away_and_back(browser, job)
        early = flower.get("/throughput/metrics").text
        job.until(lambda status: status["finished"])
        browser.until(lambda: browser.text("#tp-left") == "done", "the end")
        total = sum(SAMPLES.values())
        assert browser.text("#tp-progress") == f"{total} of {total}"
        assert sum(number(row[4]) for row in browser.rows("tp-datasets")) == total
        check_agreement(job, early, flower.get("/throughput/metrics").text)


def _away_and_back(browser: Browser, job: Job) -> None:
    """A Redis that hangs: what was seen stays, and is said to be old."""
    (server,) = [one for one in job.machine.processes() if _is_redis(one)]
    seen = done(browser)
    server.send_signal(signal.SIGSTOP)
    try:
        browser.until(lambda: browser.text("#tp-live") == "Redis does not answer", "Redis is missed")
        assert done(browser) >= seen
        assert "These figures are of" in browser.text("#tp-banner")
    finally:
        server.send_signal(signal.SIGCONT)
    browser.until(lambda: browser.text("#tp-live").startswith("Live"), "Redis is back")


def _is_redis(process: psutil.Process) -> bool:
    return "server" in process.name() and any("dir" in word for word in process.cmdline())


def test_nothing_was_asked_of_any_other_host_and_the_console_is_silent(browser: Browser, job: Job) -> None:
    browser.drain()
    assert len(browser.requests) > 100
    addresses = [urlsplit(url) for url in browser.requests]
    hosts = {one.netloc for one in addresses if one.scheme not in ("data", "blob", "chrome")}
    assert hosts == {f"127.0.0.1:{job.flower.port}"}
    # While Flower was down the browser itself says that its addresses did not answer.
    away = re.compile(
        r"/throughput/(data|history)\S* - Failed to load resource: net::ERR_(CONNECTION|EMPTY)_\w+"
    )
    assert [line for line in browser.console if not away.search(line)] == []
