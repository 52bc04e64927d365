"""A real Chromium for tests, driven by selenium; without one the tests are skipped and say so."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--hide-scrollbars", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
HEIGHT = 900


class Browser:
    """One window; what it asked for and what its console said since it was opened."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.requests: list[str] = []
        self.console: list[str] = []

    def open(self, url: str) -> None:
        """Load a page anew."""
        self.driver.get(url)

    def look(self, *, width: int, dark: bool = False) -> None:
        """Be so wide, and prefer light or dark."""
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script)

    def text(self, selector: str) -> str:
        """What an element says; empty when there is none."""
        said: str = self.run(f"return document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return said.replace("\u202f", " ").strip()

    def rows(self, table: str) -> list[list[str]]:
        """The cells of a table's body."""
        return [
            [cell.replace("\u202f", " ").strip() for cell in row]
            for row in self.run(
                f"return [...document.querySelectorAll('#{table} tbody tr')]"
                ".map((row) => [...row.cells].map((cell) => cell.innerText))"
            )
        ]

    def until(self, condition: Callable[[], Any], what: str, within_s: float = 60.0) -> Any:
        """Wait for a condition; what it gave."""
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}, but {found!r}: {self.text('#throughput')[:2000]}"
            time.sleep(0.2)
        return found

    def drain(self) -> None:
        """Read what was logged since the last time."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        self.console += [f"{one['level']} {one['message']}" for one in self.driver.get_log("browser")]

    def picture(self, path: Path, *, width: int, height: int | None = None) -> None:
        """The page as a PNG, down to its end unless a height is given."""
        height = height or self.run("return document.documentElement.scrollHeight")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        time.sleep(0.5)  # charts are drawn anew for the new width
        path.write_bytes(self.driver.get_screenshot_as_png())


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """An empty profile that has never seen anything."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip("needs Chromium and its driver: `apt-get install -y chromium chromium-driver`")
    selenium = pytest.importorskip("selenium", reason="needs selenium: `pip install -e '.[browser]'`")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    assert selenium
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
