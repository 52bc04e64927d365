"""The page says numbers as the terminal does, and its charts' scales are round."""

import json
from pathlib import Path

import pytest

from producer import words
from tests.browser.conftest import Browser

pytestmark = pytest.mark.browser
STATIC = Path(__file__).parents[2] / "workers" / "flower" / "static"
NUMBERS = [0, 1, 9, 10, 59, 60, 99, 100, 999, 1000, 1001, 9_949, 12_345, 99_949, 99_951, 999_499, 999_500]
NUMBERS += [1_080, 3_599, 3_600, 7_199, 86_399, 172_799, 172_800, 999_999, 1_000_000, 92_100_000, 64 * 10**9]


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """An empty page with the scripts alone."""
    folder = tmp_path_factory.mktemp("words")
    scripts = "".join(f"<script src='file://{STATIC / name}'></script>" for name in ("words.js", "chart.js"))
    (folder / "page.html").write_text(
        f"<!doctype html><meta charset='utf-8'><title>words</title>{scripts}", encoding="utf-8"
    )
    browser.open(f"file://{folder / 'page.html'}")
    return browser


def said(page: Browser, function: str, values: list[float]) -> list[str]:
    found: list[str] = page.run(f"return {json.dumps(values)}.map((value) => {function}(value))")
    return [one.replace("\u202f", " ") for one in found]


@pytest.mark.parametrize("name", ["count", "big", "size", "duration"])
def test_a_number_is_said_as_in_the_terminal(page: Browser, name: str) -> None:
    assert said(page, f"Words.{name}", NUMBERS) == [getattr(words, name)(value) for value in NUMBERS]


def test_shares_are_never_rounded_up_to_all(page: Browser) -> None:
    assert said(page, "Words.share", [0, 0.004, 0.0995, 0.5, 0.999, 1]) == [
        *("0 %", "0.4 %", "9.9 %", "50 %", "99 %", "100 %")
    ]


def test_steps_of_a_scale_are_round_and_reach_the_top(page: Browser) -> None:
    steps = page.run("return [0.03, 0.9, 1, 1.1, 3, 7, 12, 49, 51, 1e6 + 1].map(Chart.nice)")
    assert steps == pytest.approx([0.05, 1, 1, 2, 5, 10, 20, 50, 100, 2e6])


def test_what_is_not_known_is_a_dash(page: Browser) -> None:
    functions = ("Words.count", "Words.big", "Words.size", "Words.duration", "Words.share")
    assert [page.run(f"return {name}(null)") for name in functions] == ["—"] * len(functions)
