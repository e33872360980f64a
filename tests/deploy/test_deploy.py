"""What is deployed agrees with what runs: Dockerfile, docker-compose.yml, monitoring/, k8s/base.

No engine is needed; test_image builds and runs the images.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from cloze.service.server.process import _DRAIN_MARGIN_S
from cloze.service.settings import ENV_PREFIX, Settings, load_settings
from tests.support.certificates import make_certificate
from tests.support.command import call
from tests.support.serving import Server, bare_environment, running_server

ROOT = Path(__file__).parents[2]
Servers = Callable[[tuple[str, ...]], Server]


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def instructions(name: str) -> list[str]:
    """Return what follows an instruction of the Dockerfile, of all stages; continued lines are joined."""
    joined = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return re.findall(rf"^{name} +(.+)$", joined, re.MULTILINE)


COMPOSE = load("docker-compose.yml")
DEPLOYMENT = load("k8s/base/deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
SERVICE = load("k8s/base/service.yaml")
(SCRAPE,) = load("monitoring/prometheus.yml")["scrape_configs"]
(SCRAPE_TARGET,) = SCRAPE["static_configs"][0]["targets"]
ANNOTATIONS = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
PROBES = {kind: CONTAINER[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}


def image_environment() -> dict[str, str]:
    words = [word for value in instructions("ENV") for word in shlex.split(value)]
    return dict(word.split("=", 1) for word in words)


ENVIRONMENTS = {
    "image": image_environment(),
    "compose": image_environment() | COMPOSE["services"]["cloze"]["environment"],
    "kubernetes": image_environment()
    | dict(line.split("=", 1) for line in (ROOT / "k8s/base/settings.env").read_text().split()),
}


def settings_in(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What the service would make of it."""
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        if name.startswith(ENV_PREFIX):
            monkeypatch.setenv(name, value)
    return load_settings()


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not on PATH")
    return path


def test_hadolint_accepts_the_dockerfile() -> None:
    call(Path(sys.executable).with_name("hadolint"), ROOT / "Dockerfile", timeout=60)  # fmt: skip


def test_prometheus_accepts_its_configuration() -> None:
    command = [tool("promtool"), "check", "config", str(ROOT / "monitoring/prometheus.yml")]
    call(*command, timeout=60)


def test_every_variable_is_a_setting() -> None:
    files = ["Dockerfile", "docker-compose.yml", "k8s/base/deployment.yaml"]
    text = "".join((ROOT / file).read_text() for file in [*files, "docs/deploy.md"])
    named = set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+\b", text))
    assert named <= {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}


@pytest.mark.parametrize("place", ENVIRONMENTS)
def test_the_service_listens_where_it_is_asked(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(ENVIRONMENTS[place], monkeypatch)
    assert settings.host == "0.0.0.0"
    assert settings.model_store == Path("/bundles")
    (container_port,) = CONTAINER["ports"]
    (service_port,) = SERVICE["spec"]["ports"]
    (published,) = COMPOSE["services"]["cloze"]["ports"]
    by_name = {container_port["name"]: container_port["containerPort"]}
    scraped = urlsplit(f"//{SCRAPE_TARGET}")
    assert scraped.hostname in COMPOSE["services"]
    assert {
        int(instructions("EXPOSE")[0]),
        int(published.split(":")[-1]),
        scraped.port,
        int(ANNOTATIONS["prometheus.io/port"]),
        service_port["port"],
        by_name[service_port["targetPort"]],
        *(by_name[probe["httpGet"]["port"]] for probe in PROBES.values()),
    } == {settings.port}


def test_every_path_asked_for_is_answered(servers: Servers) -> None:
    server = servers(())
    paths = {kind: probe["httpGet"]["path"] for kind, probe in PROBES.items()}
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/healthz"}
    for path in {*paths.values(), SCRAPE["metrics_path"], ANNOTATIONS["prometheus.io/path"]}:
        assert httpx.get(server.url + path).status_code == 200, path


def health(**environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the image's health check with settings."""
    (check,) = instructions("HEALTHCHECK")
    program, *arguments = json.loads(check.split("CMD", 1)[1])
    assert program == "python"
    # A proxy that the container inherits must not be asked for loopback.
    env = bare_environment(http_proxy="http://127.0.0.1:9", no_proxy="", **environment)
    return call(
        sys.executable,
        *arguments,
        check=False,
        env=env | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        timeout=30,
    )


def test_the_health_check_asks_the_server_as_it_is_configured(
    servers: Servers, tiny_store: Path, tmp_path: Path
) -> None:
    """Another port, an address that means all of them, TLS, and names that clients must use."""
    port = str(urlsplit(servers(()).url).port)
    done = health(CLOZE_HOST="0.0.0.0", CLOZE_PORT=port)
    assert (done.returncode, done.stderr) == (0, ""), done
    files = make_certificate(tmp_path)
    tls = {
        "CLOZE_TLS_CERTIFICATE": str(files.public),
        "CLOZE_TLS_KEY": str(files.private),
        "CLOZE_HOST": "0.0.0.0",
        "CLOZE_ALLOWED_HOSTS": "embed.example",
    }
    with running_server(tiny_store, "--model", "bert", **tls) as secured:
        tls["CLOZE_PORT"] = str(urlsplit(secured.url).port)
        done = health(**tls)
        assert done.returncode == 0, done
        plain = health(CLOZE_PORT=tls["CLOZE_PORT"])
        assert plain.returncode == 1
        assert "does not answer" in plain.stderr
    assert health(**tls).returncode == 1, "it has ended"


def test_the_health_check_tells_ready_from_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")

        refusing = pool.submit(refuse)
        done = health(CLOZE_PORT=str(listener.getsockname()[1]))
        refusing.result()
    assert done.returncode == 1
    assert "status 503" in done.stderr


def test_no_service_link_becomes_a_setting() -> None:
    assert f"{SERVICE['metadata']['name']}_PORT".upper() in {
        f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields
    }
    assert POD["enableServiceLinks"] is False
    kserve = yaml.safe_load((ROOT / "k8s/kserve/inferenceservice.yaml").read_text())
    assert kserve["spec"]["predictor"]["enableServiceLinks"] is False


def test_a_drain_ends_before_the_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the pods' drain does; see test_kubernetes."""
    settings = settings_in(ENVIRONMENTS["compose"], monkeypatch)
    drain_s = settings.drain_s + settings.shutdown_grace_ms / 1000 + _DRAIN_MARGIN_S
    period = COMPOSE["services"]["cloze"]["stop_grace_period"]
    assert drain_s < int(period.removesuffix("s"))


def test_the_user_is_the_same_number_and_not_root() -> None:
    (user,) = instructions("USER")
    security = POD["securityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert security["runAsUser"] > 0
    assert security["runAsNonRoot"]


def test_the_pod_may_do_nothing_it_need_not() -> None:
    """What the profile restricted does not ask for; see test_kubernetes."""
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert POD["automountServiceAccountToken"] is False
    for amounts in ("limits", "requests"):
        assert set(CONTAINER["resources"][amounts]) == {"cpu", "memory"}
