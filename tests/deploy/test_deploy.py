"""What is deployed agrees with what runs: Dockerfile, docker-compose.yml, monitoring/, k8s/base and docs/deployment.md.

No engine is needed: the Dockerfile only calls scripts, and the slow tests call them as it does.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
import tomllib
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from kubernetes_validate import utils as kubernetes

from cloze.model_store.locations import DEFAULT_ROOT
from cloze.service.server.process import _DRAIN_MARGIN_S
from cloze.service.settings import ENV_PREFIX, Settings, load_settings
from tests.support.certificates import make_certificate
from tests.support.serving import Server, bare_environment, running_server

ROOT = Path(__file__).parents[2]
NOT_IN_THE_IMAGE = (
    "torch",
    "onnx",
    "transformers",
    "safetensors",
    "pip",
)  # a hub client is: tokenizers depends on it

Instructions = list[tuple[str, str]]


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def parse_dockerfile() -> dict[str, Instructions]:
    """Each stage's instructions, in order; continued lines are joined. The arguments before the
    first stage are those of the stage ``""``.
    """
    lines = [
        line
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if not line.lstrip().startswith("#")
    ]
    stages: dict[str, Instructions] = {"": []}
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, value = line.split(maxsplit=1)
        if name == "FROM":
            stages[value.split(" AS ")[1]] = []
        list(stages.values())[-1].append((name, value))
    return stages


STAGES = parse_dockerfile()
ARGUMENTS = STAGES.pop("")
IMAGE = STAGES["runtime"] + STAGES["serving"]
TARGETS = ("cpu", "gpu", "export")
COMPOSE = load("docker-compose.yml")
DEPLOYMENT = load("k8s/base/deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
SERVICE = load("k8s/base/service.yaml")
(SCRAPE,) = load("monitoring/prometheus.yml")["scrape_configs"]
(SCRAPE_TARGET,) = SCRAPE["static_configs"][0]["targets"]
ANNOTATIONS = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
PROBES = {kind: CONTAINER[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}


def values_of(name: str, instructions: Instructions) -> list[str]:
    return [value for each, value in instructions if each == name]


def copied(stage: str) -> list[tuple[list[str], str]]:
    """Sources and target of each COPY from the build context."""
    copies = [shlex.split(value) for value in values_of("COPY", STAGES[stage])]
    return [(words[:-1], words[-1]) for words in copies if not words[0].startswith("--from=")]


def image_environment() -> dict[str, str]:
    words = [
        word
        for value in values_of("ENV", STAGES["interpreter"] + IMAGE)
        for word in shlex.split(value)
    ]
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


# ---- tools' own checks -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rendered() -> list[dict[str, Any]]:
    command = [tool("kubectl"), "kustomize", str(ROOT / "k8s/base")]
    return list(
        yaml.safe_load_all(
            subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
        )
    )


def test_every_script_is_executable() -> None:
    scripts = [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]
    assert [script.name for script in scripts if not os.access(script, os.X_OK)] == []


# The first version that has the sleep of preStop without a feature gate, and the newest known.
@pytest.mark.parametrize("version", ["1.30", kubernetes.latest_version()])
def test_kubernetes_accepts_every_object(rendered: list[dict[str, Any]], version: str) -> None:
    assert sorted(each["kind"] for each in rendered) == [
        "ConfigMap",
        "Deployment",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
    ]
    for each in rendered:
        kubernetes.validate(each, version, strict=True)


def test_the_documented_overlay_names_registry_and_tag(tmp_path: Path) -> None:
    block = re.search(
        r"^    # k8s/mine/kustomization.yaml\n((?:    .*\n)+)",
        (ROOT / "docs/deployment.md").read_text(),
        re.MULTILINE,
    )
    assert block
    shutil.copytree(ROOT / "k8s/base", tmp_path / "base")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kustomization.yaml").write_text(textwrap.dedent(block[1]))
    command = [tool("kubectl"), "kustomize", str(tmp_path / "mine")]
    rendered = yaml.safe_load_all(
        subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    )
    (deployment,) = [each for each in rendered if each["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "REGISTRY/cloze:TAG"


def test_prometheus_accepts_its_configuration() -> None:
    command = [tool("promtool"), "check", "config", str(ROOT / "monitoring/prometheus.yml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


# ---- agreement with the service ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [
        "Dockerfile",
        "docker-compose.yml",
        "k8s/base/deployment.yaml",
        "k8s/base/kustomization.yaml",
        "docs/deployment.md",
    ],
)
def test_every_variable_is_a_setting(file: str) -> None:
    named = set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+\b", (ROOT / file).read_text()))
    assert named <= {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}


@pytest.mark.parametrize("place", ENVIRONMENTS)
def test_the_service_accepts_its_variables(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(ENVIRONMENTS[place], monkeypatch)
    assert settings.host == "0.0.0.0"
    assert settings.model_store == Path("/bundles")


@pytest.mark.parametrize(
    "path",
    sorted(
        {probe["httpGet"]["path"] for probe in PROBES.values()}
        | {SCRAPE["metrics_path"], ANNOTATIONS["prometheus.io/path"]}
    ),
)
def test_every_path_asked_for_is_answered(server: Server, path: str) -> None:
    assert httpx.get(server.url + path).status_code == 200


def health(**environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the image's health check with settings."""
    (check,) = values_of("HEALTHCHECK", IMAGE)
    program, *arguments = json.loads(check.split("CMD", 1)[1])
    assert program == "python"
    # A proxy that the container inherits must not be asked for loopback.
    env = bare_environment(http_proxy="http://127.0.0.1:9", no_proxy="", **environment)
    return subprocess.run(
        [sys.executable, *arguments],
        env=env | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_health_check_asks_the_server_as_it_is_configured(
    server: Server, tiny_store: Path, tmp_path: Path
) -> None:
    """Another port, an address that means all of them, TLS, and names that clients must use."""
    port = str(urlsplit(server.url).port)
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


def test_the_health_check_has_the_defaults_of_the_settings() -> None:
    text = (ROOT / "cloze/health.py").read_text()
    for name, default in re.findall(r'environ.get\("CLOZE_(\w+)", "([^"]*)"\)', text):
        assert str(Settings.model_fields[name.lower()].default) == default
    named = set(re.findall(rf"{ENV_PREFIX}([A-Z_]+)", text))
    assert named == {"HOST", "PORT", "TLS_CERTIFICATE"}


def test_probes_ask_what_they_are_for() -> None:
    paths = {kind: probe["httpGet"]["path"] for kind, probe in PROBES.items()}
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/healthz"}


@pytest.mark.parametrize("place", ENVIRONMENTS)
def test_ports_agree(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = settings_in(ENVIRONMENTS[place], monkeypatch).port
    (container_port,) = CONTAINER["ports"]
    (service_port,) = SERVICE["spec"]["ports"]
    (published,) = COMPOSE["services"]["cloze"]["ports"]
    by_name = {container_port["name"]: container_port["containerPort"]}
    assert {
        int(values_of("EXPOSE", IMAGE)[0]),
        int(published.split(":")[-1]),
        urlsplit(f"//{SCRAPE_TARGET}").port,
        int(ANNOTATIONS["prometheus.io/port"]),
        service_port["port"],
        by_name[service_port["targetPort"]],
        *(by_name[probe["httpGet"]["port"]] for probe in PROBES.values()),
    } == {port}


def test_the_scraped_host_is_the_compose_service() -> None:
    assert urlsplit(f"//{SCRAPE_TARGET}").hostname in COMPOSE["services"]


def test_the_service_selects_the_pods() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels


def test_no_service_link_becomes_a_setting() -> None:
    assert f"{SERVICE['metadata']['name']}_PORT".upper() in {
        f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields
    }
    assert POD["enableServiceLinks"] is False
    kserve = yaml.safe_load((ROOT / "k8s/kserve/inferenceservice.yaml").read_text())
    assert kserve["spec"]["predictor"]["enableServiceLinks"] is False


def test_a_drain_ends_before_the_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    def drain_s(place: str) -> float:
        settings = settings_in(ENVIRONMENTS[place], monkeypatch)
        return settings.drain_s + settings.shutdown_grace_ms / 1000 + _DRAIN_MARGIN_S

    pre_stop_s = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pre_stop_s + drain_s("kubernetes") < POD["terminationGracePeriodSeconds"]
    assert drain_s("compose") < int(
        COMPOSE["services"]["cloze"]["stop_grace_period"].removesuffix("s")
    )


def test_mounts_lie_on_the_bundles_folder_or_tmp() -> None:
    """Never on ``model_store/``: that would hide the package."""
    text = (ROOT / "docker-compose.yml").read_text()
    assert ":/bundles:ro" in text
    assert not re.search(r":/\S*model_store", text)
    assert [mount["mountPath"] for mount in CONTAINER["volumeMounts"]] == ["/tmp"]


# ---- least privilege ---------------------------------------------------------------------------------------------------


def test_the_user_is_the_same_number_and_not_root() -> None:
    (user,) = values_of("USER", IMAGE)
    security = POD["securityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert security["runAsUser"] > 0
    assert security["runAsNonRoot"]


def test_the_pod_may_do_nothing_it_need_not() -> None:
    security = CONTAINER["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["automountServiceAccountToken"] is False
    assert (
        set(CONTAINER["resources"]["limits"])
        == set(CONTAINER["resources"]["requests"])
        == {"cpu", "memory"}
    )


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_compose_services_may_do_nothing_they_need_not(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize(
    ("service", "image"), [("prometheus", "prom/prometheus:v"), ("grafana", "grafana/grafana:")]
)
def test_foreign_images_are_pinned(service: str, image: str) -> None:
    default = rf"\$\{{{service.upper()}_IMAGE:-{image}\d+\.\d+\.\d+\}}"
    assert re.fullmatch(default, COMPOSE["services"][service]["image"])


# ---- the Dockerfile ----------------------------------------------------------------------------------------------------


def base_of(stage: str) -> str:
    """The stage that a stage starts from, and so on, to the first."""
    name, value = STAGES[stage][0]
    assert name == "FROM"
    return base_of(value.split()[0]) if value.split()[0] in STAGES else stage


def test_all_stages_share_one_interpreter() -> None:
    """A virtual environment is copied between stages: its interpreter and its path must be the same
    in both.
    """
    assert STAGES["sources"][0] == ("FROM", "scratch AS sources")
    assert {base_of(stage) for stage in STAGES if stage != "sources"} == {"interpreter"}
    for target in TARGETS:
        for run in values_of("RUN", STAGES[f"install-{target}"]):
            assert shlex.split(run) == ["scripts/install-serving", "/opt/cloze", target]
        copies = values_of("COPY", STAGES[target])
        assert copies == [f"--from=install-{target} /opt/cloze /opt/cloze"]


def test_the_base_image_is_an_argument_with_a_tag() -> None:
    assert STAGES["interpreter"] == [("FROM", "${PYTHON_IMAGE} AS interpreter")]
    arguments = dict(value.split("=") for name, value in ARGUMENTS if name == "ARG")
    assert re.fullmatch(r"python:\d+\.\d+-slim", arguments["PYTHON_IMAGE"])


def test_the_revision_is_an_argument_of_what_names_it() -> None:
    """Not of the layer with the dependencies, which each commit would build again."""
    assert ("ARG", "REVISION=unknown") in ARGUMENTS
    for target in TARGETS:
        stage = [name if name == "RUN" else value for name, value in STAGES[f"install-{target}"]]
        assert stage[-2:] == ["REVISION", "RUN"]
        assert stage.index("RUN") < stage.index("REVISION")
    names = [value for name, value in STAGES["runtime"] if name in ("ARG", "LABEL")]
    assert names[0] == "REVISION"
    assert 'org.opencontainers.image.revision="${REVISION}"' in names[1]


def test_the_default_target_serves_on_a_cpu() -> None:
    assert list(STAGES)[-1] == "cpu"


def test_every_run_is_a_script() -> None:
    runs = [value for stage in STAGES for value in values_of("RUN", STAGES[stage])]
    assert runs
    for run in runs:
        assert re.fullmatch(r"scripts/[a-z-]+( [\w./-]+)*", run), (
            f"not a plain call of a script: {run}"
        )
        script = ROOT / run.split()[0]
        assert script.is_file()
        assert os.access(script, os.X_OK), f"not executable: {script.name}"


def test_every_copied_path_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    for stage in STAGES:
        for sources, _ in copied(stage):
            for source in sources:
                assert list(ROOT.glob(source)), source
                first = f"!{Path(source).parts[0]}"
                assert any(fnmatchcase(first, line) for line in ignored), source


def test_what_the_image_copies_was_made_in_its_stage() -> None:
    for value in (copy for target in TARGETS for copy in values_of("COPY", STAGES[target])):
        stage, source, _ = value.removeprefix("--from=").split()
        assert any(source in shlex.split(run) for run in values_of("RUN", STAGES[stage])), value


def test_the_image_carries_the_default_bundles() -> None:
    assert (["model_store/bundles"], "/bundles") in copied("serving")
    assert image_environment()["CLOZE_MODEL_STORE"] == "/bundles"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored.index("model_store/bundles/*") < ignored.index("!model_store/bundles/cloze-*")
    # Readable by another user than the one who built the image.
    bundles = list(DEFAULT_ROOT.glob("cloze-*/*/*"))
    assert bundles
    assert all(file.stat().st_mode & 0o004 for file in bundles)


def test_signals_reach_the_server() -> None:
    """The exec form: in the shell form a shell would be process 1 and keep SIGTERM to itself."""
    assert [json.loads(value) for value in values_of("ENTRYPOINT", IMAGE)] == [["cloze"]]
    assert [json.loads(value) for value in values_of("CMD", IMAGE)] == [["serve"]]
    assert not values_of("STOPSIGNAL", IMAGE)


# ---- the stages, run ---------------------------------------------------------------------------------------------------


def test_the_server_calls_nobody(tmp_path: Path, tiny_store: Path) -> None:
    """Onnxruntime's telemetry keeps an identity and a queue under HOME before it sends anything."""
    with running_server(tiny_store, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)):
        assert list(tmp_path.iterdir()) == []


VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
REVISION = "0123456789abcdef" * 2 + "01234567"


def run_stage(stage: str, folder: Path, moved: dict[str, Path]) -> None:
    """Do in a folder what the stage does in /src, with its absolute paths moved."""
    for name, value in STAGES[stage]:
        words = shlex.split(value)
        if name == "COPY" and words[0].startswith("--from="):
            assert words[1:] == ["/", "./"]
            run_stage(words[0].removeprefix("--from="), folder, moved)
        elif name == "COPY":
            for source in (found for pattern in words[:-1] for found in ROOT.glob(pattern)):
                if source.is_dir():
                    # As a build does: a link stays a link, also to what the image does not have.
                    shutil.copytree(
                        source,
                        folder / words[-1],
                        symlinks=True,
                        ignore=shutil.ignore_patterns("__pycache__"),
                    )
                else:
                    (folder / words[-1]).mkdir(exist_ok=True)
                    shutil.copy2(source, folder / words[-1] / source.name)
        elif name == "RUN":
            for old, new in moved.items():
                words = [re.sub(rf"^{old}(?=/|$)", str(new), word) for word in words]
            env = {**os.environ, "PYTHON": sys.executable, "REVISION": REVISION}
            result = subprocess.run(
                words, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False
            )
            assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(600)
def test_the_install_stage_makes_a_server_without_torch(tmp_path: Path, tiny_store: Path) -> None:
    venv = tmp_path / "cloze"
    (tmp_path / "src").mkdir()
    run_stage("packages", tmp_path / "src", {})
    run_stage("install-cpu", tmp_path / "src", {"/opt/cloze": venv})

    found = f"import importlib.util as u; print([name for name in {NOT_IN_THE_IMAGE} if u.find_spec(name)])"
    result = subprocess.run(
        [venv / "bin/python", "-I", "-c", found],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.strip() == "[]"

    shown = subprocess.run([venv / "bin/cloze", "--version"], check=True, capture_output=True)
    assert shown.stdout.decode() == f"cloze, version {VERSION}, revision {REVISION[:12]}\n"
    components = json.loads((venv / "sbom.cdx.json").read_text())["components"]
    (own,) = [each["version"] for each in components if each["name"] == "cloze-server"]
    assert own == f"{VERSION}+g{REVISION[:12]}"

    with running_server(tiny_store, command=(str(venv / "bin/cloze"), "serve")) as server:
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        built = f'cloze_build_info{{revision="{REVISION[:12]}",version="{VERSION}"}} 1.0'
        assert built in httpx.get(f"{server.url}/metrics").text.splitlines()
        vectors = (
            httpx.post(f"{server.url}/embed", json={"inputs": ["paris is a city", "france"]})
            .raise_for_status()
            .json()
        )
        assert [len(vector) > 0 for vector in vectors] == [True, True]
        assert server.stop() == 0
