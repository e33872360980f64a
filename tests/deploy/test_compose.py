"""docker-compose.yml, run by podman-compose: Prometheus scrapes the service and has the rules."""

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.support import containers
from tests.support.command import call
from tests.support.ports import free_port
from tests.support.prometheus import query
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
GRAFANA = ROOT / "monitoring/grafana"


def mounts(service: str) -> dict[PurePosixPath, str]:
    """Return the source of each mount of a service by its target."""
    # A variable that is not set has its default.
    volumes = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", each) for each in SERVICES[service]["volumes"]]
    pairs = [volume.split(":") for volume in volumes if ":" in volume]
    return {PurePosixPath(words[1]): words[0] for words in pairs}


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    """Its image cannot be had everywhere, so the files are checked against the mounts."""
    places = mounts("grafana")
    provisioning = PurePosixPath("/etc/grafana/provisioning")
    assert ROOT / places[provisioning] == GRAFANA / "provisioning"
    (source,) = load("datasources/prometheus.yml")["datasources"]
    url = urlsplit(source["url"])
    assert url.hostname in SERVICES
    (published,) = SERVICES["prometheus"]["ports"]
    assert url.port == int(published.split(":")[-1])
    (provider,) = load("dashboards/cloze.yml")["providers"]
    folder = ROOT / places[PurePosixPath(provider["options"]["path"])]
    (file,) = folder.glob("*.json")
    dashboard = json.loads(file.read_text())
    used = {panel["datasource"]["uid"] for panel in dashboard["panels"] if "datasource" in panel}
    assert used <= {source["uid"], "${datasource}"}


def load(path: str) -> Any:
    return yaml.safe_load((GRAFANA / "provisioning" / path).read_text())


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_cannot_take_the_machine(service: str) -> None:
    """Memory, processes and logs are bounded, and only this machine reaches the ports."""
    body = SERVICES[service]
    assert re.fullmatch(r"(\$\{\w+:-)?\d+[gm]\}?", body["mem_limit"])
    assert 0 < body["pids_limit"] <= 1024
    assert body["logging"]["options"].keys() == {"max-size", "max-file"}
    assert body["read_only"]
    assert body["cap_drop"] == ["ALL"]
    assert body["security_opt"] == ["no-new-privileges:true"]
    for port in body.get("ports", []):
        assert re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", port).startswith("127.0.0.1:")
    # Docker's health checks do not run everywhere, for example without systemd under podman.
    assert isinstance(body.get("depends_on", []), list)
    for source in mounts(service).values():
        assert source in COMPOSE["volumes"] or (ROOT / source).exists(), source


@pytest.fixture(scope="module")
def prometheus_image() -> Iterator[str]:
    containers.podman()
    image = containers.build(
        "prometheus",
        *("--build-arg", f"BASE_IMAGE={containers.BASE}"),
        file="monitoring/prometheus.Dockerfile",
    )
    yield image
    containers.remove_image(image)


@pytest.fixture(scope="module")
def podman_compose(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install podman-compose in an environment of its own."""
    containers.podman()
    venv = tmp_path_factory.mktemp("podman-compose")
    uv = [sys.executable, "-m", "uv", "--quiet"]
    subprocess.run([*uv, "venv", "--python", sys.executable, str(venv)], check=True)
    install = [*uv, "pip", "install", "--python", str(venv), "podman-compose==1.6.0"]
    subprocess.run(install, check=True, timeout=300)
    return str(venv / "bin/podman-compose")


def make_keys(folder: Path) -> None:
    """Do what the first lines of docker-compose.yml say."""
    folder.mkdir()
    file = folder / "keys.toml"
    words = ["keys", "add", "prometheus", "--scope", "metrics", "--file", str(file)]
    done = call(sys.executable, "-m", "cloze", *words)
    (folder / "metrics-key").write_text(done.stdout)
    for each in folder.iterdir():
        each.chmod(0o644)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("has_keys", [False, True], ids=["open", "keys"])
def test_prometheus_scrapes_the_service_and_has_the_rules(
    cpu_image: str, prometheus_image: str, podman_compose: str, tmp_path: Path, has_keys: bool
) -> None:
    for file in ("docker-compose.yml", "docker-compose.keys.yml"):
        shutil.copy(ROOT / file, tmp_path)
    shutil.copytree(ROOT / "monitoring", tmp_path / "monitoring")
    serving, prometheus = free_port(), free_port()
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {
        "SERVING_IMAGE": cpu_image,
        "PROMETHEUS_IMAGE": prometheus_image,
        "SERVING_PORT": str(serving),
        "PROMETHEUS_PORT": str(prometheus),
    }
    project = f"cloze-test-{uuid.uuid4().hex[:8]}"
    command = [podman_compose, "--file", str(tmp_path / "docker-compose.yml")]
    if has_keys:
        make_keys(tmp_path / "keys")
        environment["METRICS_KEY"] = "./keys/metrics-key"
        command += ["--file", str(tmp_path / "docker-compose.keys.yml")]

    def compose(*words: str) -> str:
        done = call(
            *command, "--project-name", project, *words, cwd=tmp_path, env=environment, timeout=300
        )
        return done.stdout

    url = f"http://127.0.0.1:{prometheus}"
    try:
        compose(
            "--podman-run-args=--pull=never", "up", "--no-build", "--detach", "cloze", "prometheus"
        )
        wait_until(lambda: containers.answers(f"http://127.0.0.1:{serving}/readyz"), 60)
        wait_until(lambda: containers.answers(f"{url}/-/ready"), 60)
        # Two intervals of prometheus.yml, and the time of an evaluation.
        wait_until(lambda: values(url, 'up{job="cloze"}') == ["1"], 60)
        wait_until(lambda: values(url, "cloze_ready") == ["1"], 60)
        status = httpx.get(f"http://127.0.0.1:{serving}/metrics").status_code
        assert status == (401 if has_keys else 200)
        groups = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"]
        written = yaml.safe_load((ROOT / "monitoring/rules.yml").read_text())["groups"]
        assert {group["name"] for group in groups} == {group["name"] for group in written}
        for group in groups:
            assert all(rule["health"] != "err" for rule in group["rules"]), group
    finally:
        compose("down", "--volumes")


def values(url: str, expression: str) -> list[str]:
    return [sample["value"][1] for sample in query(url, expression)]
