"""Rules, alerts, runbooks and the dashboard: on what a real Prometheus reads from real servers."""

import hashlib
import json
import math
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.support.certificates import make_certificate
from tests.support.command import call
from tests.support.kustomize import Object, of_kind, rendered
from tests.support.ports import free_port
from tests.support.prometheus import MONITORING, query, running_prometheus, running_with
from tests.support.serving import Server, running_server
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
RULES = [
    rule
    for group in yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
DASHBOARD = json.loads((MONITORING / "grafana/dashboards/cloze.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


@pytest.mark.slow
def test_promtool_accepts_the_rules_and_their_tests() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    for command in (("check", "rules", "rules.yml"), ("test", "rules", "rules.test.yml")):
        call("promtool", *command, cwd=MONITORING, timeout=60)


def test_every_alert_has_its_tests_and_a_runbook() -> None:
    """In a test it fires, and in the test of a healthy server it does not."""
    cases = yaml.safe_load((MONITORING / "rules.test.yml").read_text())["tests"]
    tests = [test for case in cases for test in case.get("alert_rule_test", ())]
    assert {test["alertname"] for test in tests if test["exp_alerts"]} == ALERTS.keys()
    healthy = cases[0]["alert_rule_test"]
    assert [test["alertname"] for test in healthy] == list(ALERTS)
    assert not any(test["exp_alerts"] for test in healthy)
    _, text = (ROOT / "docs/operate.md").read_text().split("\n## Runbooks\n")
    _, *parts = re.split(r"^### (\w+)$", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    for name, rule in ALERTS.items():
        address, section = rule["annotations"]["runbook_url"].split("#")
        assert f"`{name}`" in sections[section], name
        assert re.fullmatch("https://.+/docs/operate.html", address), "where the site has the page"


KEY, LIMITED = "cloze_metrics", "cloze_limited"
KEYS = f"""
[prometheus]
sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"
scopes = ["metrics", "inference"]

[limited]
sha256 = "{hashlib.sha256(LIMITED.encode()).hexdigest()}"
scopes = ["inference"]
requests_per_minute = 1
"""


@dataclass
class Scraped:
    """A Prometheus, and the addresses of the servers that it scrapes, by their shape."""

    url: str
    instances: dict[str, str]


@pytest.fixture(scope="module")
def prometheus(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """A Prometheus that has scraped a server of each shape, with keys and TLS, under load."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "keys.toml").write_text(KEYS)
    files = make_certificate(folder)
    settings = {
        "CLOZE_MAX_QUEUE_WAIT_MS": "1",
        "CLOZE_KEYS_FILE": str(folder / "keys.toml"),
        "CLOZE_TLS_CERTIFICATE": str(files.public),
        "CLOZE_TLS_KEY": str(files.private),
    }
    with (
        running_server(tiny_store, **settings) as single,
        running_server(tiny_store, "--frontends", "1", **settings) as several,
        running_prometheus(folder, [single.url, several.url], KEY) as url,
        httpx.Client(verify=False, headers={"authorization": f"Bearer {KEY}"}) as client,
    ):
        servers = {"one process": single, "front ends": several}
        for server in servers.values():
            load(client, server)  # answered also on a busy machine
        ended = time.monotonic() + 8
        with ThreadPoolExecutor(8) as pool:
            while time.monotonic() < ended:
                list(pool.map(lambda server: load(client, server), [*servers.values()] * 8))
        yield Scraped(url, {shape: urlsplit(each.url).netloc for shape, each in servers.items()})


def load(client: httpx.Client, server: Server) -> None:
    """Send requests of all kinds, of which some are refused."""
    post = client.post
    post(f"{server.url}/embed", json={"inputs": ["walk " * 400] * 16})
    post(f"{server.url}/fill-mask", json={"inputs": "the [MASK] king"})
    post(f"{server.url}/qa", json={"inputs": {"question": "who?", "context": "the king"}})
    post(f"{server.url}/embed", json={"inputs": 1})
    limited = {"authorization": f"Bearer {LIMITED}"}
    post(f"{server.url}/embed", json={"inputs": "walk"}, headers=limited)


def is_number(result: list[Any]) -> bool:
    return any(not math.isnan(float(series["value"][1])) for series in result)


@pytest.mark.slow
def test_every_panel_shows_something(prometheus: Scraped) -> None:
    missing = []
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5s").replace("$job", ".*")
            result = query(prometheus.url, expression)
            labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            if not is_number(result):
                missing.append((panel["title"], expression))
            elif labels:
                assert any(set(labels) <= series["metric"].keys() for series in result), expression
            if "instance" in labels:  # a curve per server, of each shape
                shown = {series["metric"]["instance"] for series in result}
                assert shown == set(prometheus.instances.values()), expression
    assert not missing


ONLY = {"cloze_process_restarts_total": "front ends"}
"""Metrics that only servers of one shape have."""


def named_metrics() -> dict[str, str]:
    """Return the series that rules, the dashboard and manifests name, with the text that does."""
    texts = [rule["expr"] for rule in RULES]
    texts += [target["expr"] for panel in PANELS for target in panel["targets"]]
    texts += [file.read_text() for file in (ROOT / "k8s").rglob("*.yaml")]
    return {
        name: text
        for text in texts
        for name in re.findall(r"\b(?:cloze|process)_[a-z0-9_]+\b", text)
        if not name.endswith("_max")  # the adapter's own name of a metric
    }


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["one process", "front ends"])
def test_every_named_metric_exists_in_every_shape(prometheus: Scraped, shape: str) -> None:
    """A name that is misspelt, or that a shape of server lacks, would never ring."""
    instance, names = prometheus.instances[shape], named_metrics()
    assert len(names) > 20
    missing = {
        name: text
        for name, text in names.items()
        if ONLY.get(name, shape) == shape
        and not query(prometheus.url, f'last_over_time({name}{{instance="{instance}"}}[1m])')
    }
    assert not missing


@pytest.mark.slow
def test_the_rules_name_labels_that_exist(prometheus: Scraped) -> None:
    for rule in RULES:
        for name, matchers in re.findall(r"\b((?:cloze_\w+|up))(\{[^}]*\})?", rule["expr"]):
            known = re.findall(r"(\w+)=~?\"", matchers)
            series = query(prometheus.url, name)
            assert any(set(known) <= one["metric"].keys() for one in series), (name, matchers)
    for bound in re.findall(r'le="([^"]+)"', (MONITORING / "rules.yml").read_text()):
        name = f'cloze_request_duration_seconds_bucket{{le="{bound}"}}'
        assert query(prometheus.url, name), bound


@pytest.mark.slow
def test_the_queries_of_the_documents_find_something(prometheus: Scraped) -> None:
    texts = [(ROOT / f"docs/{name}.md").read_text() for name in ("operate", "deploy")]
    queries = re.findall(
        r"(?:`|^    )([a-z0-9_ (),.]*\((?:cloze|process)_[^`\n]*)", "\n".join(texts), re.M
    )
    assert len(queries) >= 7
    for each in queries:
        assert query(prometheus.url, each), each


@pytest.mark.slow
def test_keda_finds_one_number(prometheus: Scraped) -> None:
    scaler = yaml.safe_load((ROOT / "k8s/components/keda/scaledobject.yaml").read_text())
    trigger = scaler["spec"]["triggers"][0]["metadata"]
    (result,) = query(prometheus.url, trigger["query"])
    assert float(result["value"][1]) >= 0
    assert trigger["ignoreNullValues"] == "false", "a query that finds nothing must not say 0"


def firing(url: str) -> set[str]:
    """Return the names of the alerts that fire."""
    alerts = httpx.get(f"{url}/api/v1/alerts").json()["data"]["alerts"]
    return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


@pytest.mark.slow
def test_restarts_of_a_single_process_ring(tiny_store: Path, tmp_path: Path) -> None:
    """A process that is killed and started again, as by an orchestrator."""
    port = str(free_port())
    seen: set[str] = set()
    with running_prometheus(tmp_path, [f"http://127.0.0.1:{port}"]) as url:

        def is_seen() -> bool:
            now = query(url, "process_start_time_seconds and on (instance) cloze_ready == 1")
            new = {each["value"][1] for each in now} - seen
            seen.update(new)
            return bool(new)

        for start in range(4):
            with running_server(tiny_store, "--model", "bert", "--port", port) as server:
                wait_until(is_seen)
                if start < 3:
                    assert "ClozeServerRestarts" not in firing(url)
                    server.stop(signal.SIGKILL)
                else:
                    wait_until(lambda: "ClozeServerRestarts" in firing(url))


def scrape_job(monitor: Object, annotations: dict[str, str], key: str) -> Object:
    """Return the scrape configuration that the Prometheus operator makes of a ServiceMonitor.

    The annotations are those of the pods, and the key is the value of the only Secret.
    """
    (endpoint,) = monitor["spec"]["endpoints"]
    labels = {
        f"__meta_kubernetes_pod_annotation_{re.sub('[^a-zA-Z0-9]', '_', name)}": value
        for name, value in annotations.items()
    }
    names = {"sourceLabels": "source_labels", "regex": "regex", "targetLabel": "target_label"}
    job: Object = {
        "job_name": "serviceMonitor/default/cloze/0",
        "metrics_path": endpoint["path"],
        "tls_config": {"insecure_skip_verify": endpoint["tlsConfig"]["insecureSkipVerify"]},
        "relabel_configs": [
            {theirs: rule[ours] for ours, theirs in names.items()}
            for rule in endpoint["relabelings"]
        ],
        "static_configs": [{"labels": labels}],
    }
    authorization = endpoint["authorization"]
    assert authorization["credentials"] == {"name": "cloze-metrics-key", "key": "key"}
    job["authorization"] = {"type": authorization["type"], "credentials": key}
    return job


@pytest.mark.slow
def test_a_rendered_overlay_is_scraped(tiny_store: Path, tmp_path: Path) -> None:
    """Under the pod's address, though clients have to use a name."""
    objects = rendered(tmp_path, "cpu", ("tls", "keys", "monitoring-with-key"))
    (tmp_path / "keys.toml").write_text(KEYS)
    files = make_certificate(tmp_path)
    mounted = {
        "/keys/keys.toml": tmp_path / "keys.toml",
        "/tls/tls.crt": files.public,
        "/tls/tls.key": files.private,
    }
    data = of_kind(objects, "ConfigMap")["data"]
    settings = {name: str(mounted.get(value, value)) for name, value in data.items()}
    settings |= {"CLOZE_HOST": "0.0.0.0", "CLOZE_ALLOWED_HOSTS": "embed.example"}
    annotations = of_kind(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    job = scrape_job(of_kind(objects, "ServiceMonitor"), annotations, KEY)
    with running_server(tiny_store, "--model", "bert", **settings) as server:
        # Another address than those that are always accepted, as that of a pod.
        job["static_configs"][0]["targets"] = [f"127.0.0.2:{urlsplit(server.url).port}"]
        with running_with(tmp_path, {"scrape_configs": [job]}) as url:
            wait_until(lambda: [each["value"][1] for each in query(url, "up")] == ["1"])
            assert [each["value"][1] for each in query(url, "cloze_ready")] == ["1"]
