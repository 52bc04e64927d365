"""What ops/ holds for Prometheus and Grafana: read by their own tools, and naming only what there is."""

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families

from producer.machine.redis_server import free_port
from tests.workers.flower.flower_process import running_flower
from tests.workers.flower.looks import LOOK, NOW
from workers.flower.metrics import metrics

OPS = Path(__file__).parents[2] / "ops"
PROMETHEUS, GRAFANA = OPS / "prometheus", OPS / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: `apt-get install -y prometheus`"
)


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def panels(dashboard: Path) -> Iterator[dict[str, Any]]:
    for panel in json.loads(dashboard.read_text())["panels"]:
        yield panel
        yield from panel.get("panels", ())


def expressions() -> list[str]:
    """Every query of every dashboard."""
    return [
        target["expr"] for path in DASHBOARDS for panel in panels(path) for target in panel.get("targets", ())
    ]


def known() -> set[str]:
    """The names that we expose and those that the rules record."""
    exposed = {
        sample.name
        for family in text_string_to_metric_families(metrics(LOOK, NOW).decode())
        for sample in family.samples
    }
    return exposed | set(re.findall(r"record: (\S+)", (PROMETHEUS / "rules.yml").read_text()))


@needs_promtool
def test_prometheus_own_tool_takes_configuration_and_rules() -> None:
    assert "SUCCESS" in promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert "rules found" in promtool("check", "rules", PROMETHEUS / "rules.yml")


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", PROMETHEUS / "rules_test.yml")
    alerts = set(re.findall(r"alert: (\w+)", (PROMETHEUS / "rules.yml").read_text()))
    tested = set(re.findall(r"alertname: (\w+)", (PROMETHEUS / "rules_test.yml").read_text()))
    assert tested == alerts


@needs_promtool
def test_every_query_of_a_dashboard_is_one(tmp_path: Path) -> None:
    rules = [{"record": f"test:query_{at}", "expr": expr} for at, expr in enumerate(expressions())]
    assert len(rules) > 20
    path = tmp_path / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", path)


def test_rules_and_dashboards_name_only_what_is_exposed_or_recorded() -> None:
    rules = "\n".join(
        line
        for line in (PROMETHEUS / "rules.yml").read_text().splitlines()
        if not line.lstrip().startswith("#")
    )
    named = set(re.findall(r"\beyas[_:][\w:]+", "\n".join([rules, *expressions()])))
    assert len(named) > 25
    assert named <= known()


def test_a_dashboard_is_whole() -> None:
    (dashboard,) = DASHBOARDS
    found = list(panels(dashboard))
    assert len({panel["id"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            uids = {target["datasource"]["uid"] for target in panel["targets"]}
            source = (GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text()
            assert all(f"uid: {uid}\n" in source for uid in uids)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus: `apt-get install -y prometheus`"
)
def test_a_real_prometheus_scrapes_a_real_flower_behind_its_login(redis_url: str, tmp_path: Path) -> None:
    """With the configuration as it is, but for the port and the login."""
    with running_flower(tmp_path, redis_url, "--basic_auth=eyas:pass") as flower:
        text = (
            (PROMETHEUS / "prometheus.yml").read_text().replace("127.0.0.1:5555", f"127.0.0.1:{flower.port}")
        )
        text = text.replace(
            "# basic_auth: {username: eyas, password_file: /run/secrets/flower_password}",
            "basic_auth: {username: eyas, password: pass}",
        )
        (tmp_path / "prometheus.yml").write_text(text)
        (tmp_path / "rules.yml").write_bytes((PROMETHEUS / "rules.yml").read_bytes())
        port = free_port()
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/tsdb",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 90
            while not (found := _query(port, "eyas_redis_up")):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.2)
            assert [one["value"][1] for one in found] == ["1"]
            assert _query(port, 'up{job="eyas"}')[0]["value"][1] == "1"
        finally:
            process.kill()
            process.wait()


def _query(port: int, expression: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?query={quote(expression)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found
    except OSError:
        return []
