"""Rules, alerts, runbooks and the dashboard: on what a real Prometheus reads from real servers."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.prometheus import MONITORING, query, running_prometheus
from tests.serving import Server, running_server

ROOT = Path(__file__).parents[1]
RULES = [
    rule
    for group in yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
DASHBOARD = json.loads((MONITORING / "grafana/dashboards/cloze.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    for command in (("check", "rules", "rules.yml"), ("test", "rules", "rules.test.yml")):
        done = subprocess.run(
            ["promtool", *command], cwd=MONITORING, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_and_a_runbook() -> None:
    tested = {
        test["alertname"]
        for case in yaml.safe_load((MONITORING / "rules.test.yml").read_text())["tests"]
        for test in case.get("alert_rule_test", ())
        if test["exp_alerts"]
    }
    assert tested >= ALERTS.keys() - {"ClozeErrorsSlow", "ClozeSlowSlow"}, "as the fast ones"
    text = (ROOT / "docs/runbooks.md").read_text()
    sections = dict(
        zip(*[iter(re.split(r"^## (\w+)$", text, flags=re.MULTILINE)[1:])] * 2, strict=True)
    )
    for name, rule in ALERTS.items():
        path, section = rule["annotations"]["runbook_url"].split("#")
        assert path == "docs/runbooks.md"
        assert f"`{name}`" in sections[section], name


def test_the_dashboard_is_what_its_script_writes() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/make-dashboard", "--check"], timeout=60)
    assert done.returncode == 0, "run scripts/make-dashboard"


@pytest.fixture(scope="module")
def prometheus(
    tiny_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[Server]]]:
    """A Prometheus that has scraped one process and one server with front ends, both loaded."""
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        running_server(tiny_store, CLOZE_MAX_QUEUE_WAIT_MS="1") as single,
        running_server(tiny_store, "--frontends", "1") as several,
        running_prometheus(folder, [single.url, several.url]) as url,
    ):
        servers = [single, several]
        ended = time.monotonic() + 8
        with ThreadPoolExecutor(8) as pool:
            while time.monotonic() < ended:
                list(pool.map(lambda server: load(server), servers * 8))
        yield url, servers


def load(server: Server) -> None:
    """Send requests of all kinds, of which some are refused."""
    post = httpx.post
    post(f"{server.url}/embed", json={"inputs": ["walk " * 400] * 16})
    post(f"{server.url}/fill-mask", json={"inputs": "the [MASK] king"})
    post(f"{server.url}/qa", json={"inputs": {"question": "who?", "context": "the king"}})
    post(f"{server.url}/embed", json={"inputs": 1})


def is_number(result: list[Any]) -> bool:
    return any(not math.isnan(float(series["value"][1])) for series in result)


def test_every_panel_shows_something(prometheus: tuple[str, list[Server]]) -> None:
    url, _ = prometheus
    missing = []
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5s").replace("$job", ".*")
            result = query(url, expression)
            labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            if not is_number(result):
                missing.append((panel["title"], expression))
            elif labels:
                assert any(set(labels) <= series["metric"].keys() for series in result), expression
    assert not missing


def test_the_rules_find_their_metrics(prometheus: tuple[str, list[Server]]) -> None:
    """Each metric and label that a rule names exists; one that is misspelt would never fire."""
    url, _ = prometheus
    for rule in RULES:
        for name, matchers in re.findall(r"\b((?:cloze_\w+|up))(\{[^}]*\})?", rule["expr"]):
            known = re.findall(r"(\w+)=~?\"", matchers)
            series = query(url, name)
            assert series, (name, rule)
            assert any(set(known) <= one["metric"].keys() for one in series), (name, matchers)
    for bound in re.findall(r'le="([^"]+)"', (MONITORING / "rules.yml").read_text()):
        assert query(url, f'cloze_request_duration_seconds_bucket{{le="{bound}"}}'), bound


def test_the_panels_are_drawn(prometheus: tuple[str, list[Server]], tmp_path: Path) -> None:
    url, _ = prometheus
    file = tmp_path / "dashboard.png"
    command = [sys.executable, ROOT / "scripts/draw-dashboard", url, file, "--minutes", "0.2"]
    done = subprocess.run([*command, "--rate-interval", "5s"], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert 20_000 < file.stat().st_size < 300_000
