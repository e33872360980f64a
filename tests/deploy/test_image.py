"""The images, built and run: as another user, on a read-only file system, without capabilities."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cloze.service.tasks import TASKS
from tests.support import containers
from tests.support.containers import (
    Container,
    build,
    build_export,
    inspect,
    output,
    remove_image,
    running_container,
)
from tests.support.waiting import wait_until

MAX_BYTES_ABOVE_BASE = 210_000_000
"""Of the image for a CPU, without its bundles. Measured: 186 MB."""

MAX_BYTES_AT_REST = 430 << 20
"""Of the server with the default bundles, after one request per task. 300 MiB outside an image."""

DISTRIBUTIONS = (
    "import importlib.metadata as m, json;"
    "print(json.dumps([[d.metadata['Name'], d.version] for d in m.distributions()]))"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def container(cpu_image: str) -> Iterator[Container]:
    """Run the image with its own bundles."""
    with running_container(cpu_image) as container:
        yield container


def readable_copy(folder: Path, target: Path) -> Path:
    """Copy a folder so that any user can read it, as user 10001 in a container must."""
    shutil.copytree(folder, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def ask_every_task(url: str) -> set[str]:
    """Ask every task of every model with the task's examples; return the tasks."""
    asked = set()
    for model in httpx.get(f"{url}/info").json()["models"]:
        for name in model["tasks"]:
            for example in TASKS[name].examples.values():
                body = {**example, "model": model["name"]}
                answer = httpx.post(f"{url}{TASKS[name].route}", json=body, timeout=30)
                assert answer.status_code == 200, (model["name"], body, answer.text)
            asked.add(name)
    return asked


def test_every_task_of_info_answers(container: Container) -> None:
    tasks = {
        task
        for model in httpx.get(f"{container.url}/info").json()["models"]
        for task in model["tasks"]
    }
    assert {"fill-mask", "embed", "nsp", "qa"} <= tasks
    assert ask_every_task(container.url) == tasks


def test_memory_at_rest_is_bounded(container: Container) -> None:
    ask_every_task(container.url)
    assert container.resident_bytes() < MAX_BYTES_AT_REST


def test_the_health_check_of_the_image_passes(cpu_image: str, container: Container) -> None:
    described = inspect("image", cpu_image)  # docker and podman have it in different places
    check = described.get("Healthcheck") or described["Config"]["Healthcheck"]
    kind, *command = check["Test"]
    assert kind == "CMD"
    assert container.execute(*command).returncode == 0
    assert container.execute("env", "CLOZE_PORT=9", *command).returncode == 1


def test_the_process_may_do_nothing(container: Container) -> None:
    status = container.execute("cat", "/proc/1/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert set(fields["Uid"].split()) == set(fields["Gid"].split()) == {"10001"}
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    for place in ("/opt/cloze/x", "/bundles/x", "/x"):
        assert container.execute("touch", place).returncode != 0
    assert container.execute("touch", "/tmp/x").returncode == 0


def test_the_image_has_no_compiler_torch_or_pip(cpu_image: str) -> None:
    program = (
        "import importlib.util as u, shutil;"
        "print([n for n in ('torch', 'onnx', 'transformers', 'safetensors', 'pip') if u.find_spec(n)],"
        "[n for n in ('cc', 'gcc', 'g++', 'clang', 'make') if shutil.which(n)])"
    )
    assert output(cpu_image, "-c", program).strip() == "[] []"


def test_the_size_is_bounded(cpu_image: str) -> None:
    size, base = inspect("image", cpu_image)["Size"], inspect("image", containers.BASE)["Size"]
    bundles = int(output(cpu_image, "-sb", "/bundles", entrypoint="du").split()[0])
    assert size - base - bundles < MAX_BYTES_ABOVE_BASE


def test_the_sbom_lists_what_is_installed(cpu_image: str) -> None:
    sbom = json.loads(output(cpu_image, "/opt/cloze/sbom.cdx.json", entrypoint="cat"))
    assert sbom["bomFormat"] == "CycloneDX"
    listed = sorted([part["name"], part["version"]] for part in sbom["components"])
    assert listed == sorted(json.loads(output(cpu_image, "-c", DISTRIBUTIONS)))
    assert "cloze-server" in {name for name, _ in listed}
    unlocated = {part["name"] for part in sbom["components"] if not part.get("purl")}
    assert unlocated <= {"cloze-client", "cloze-server"}


def test_the_image_names_its_revision(cpu_image: str, container: Container) -> None:
    revision = containers.REVISION[:12]
    assert output(cpu_image, "--version", entrypoint="cloze").endswith(f"revision {revision}\n")
    assert f'cloze_build_info{{revision="{revision}"' in httpx.get(f"{container.url}/metrics").text
    labels = inspect("image", cpu_image)["Config"]["Labels"]
    assert labels["org.opencontainers.image.revision"] == containers.REVISION


def in_flight(url: str) -> float:
    """Return the requests that a server has accepted and not answered, this one included."""
    metrics = httpx.get(f"{url}/metrics").text
    (value,) = re.findall(r"^cloze_requests_in_flight (\S+)$", metrics, re.MULTILINE)
    return float(value)


def test_sigterm_finishes_the_accepted_requests(cpu_image: str) -> None:
    with running_container(cpu_image) as container:
        answers: list[httpx.Response] = []
        texts = ["a text that takes its time " * 12] * 400

        def ask() -> None:
            answers.append(httpx.post(f"{container.url}/embed", json={"inputs": texts}, timeout=60))

        idle = in_flight(container.url)
        client = threading.Thread(target=ask)
        client.start()
        wait_until(lambda: in_flight(container.url) > idle)
        assert container.stop() == 0, container.logs()
        client.join()
        assert [answer.status_code for answer in answers] == [200]
        assert "draining" in container.logs()


@pytest.mark.parametrize("folder", ["", "bert/1"])
def test_the_image_serves_as_sagemaker_starts_it(
    cpu_image: str, tiny_store: Path, tmp_path: Path, folder: str
) -> None:
    """A store or one bundle, on the port of SageMaker."""
    model = readable_copy(tiny_store / folder, tmp_path / "model")
    volume = ("--volume", f"{model}:/opt/ml/model:ro")
    with running_container(cpu_image, *volume, command=("serve",), port=8080) as container:
        assert httpx.get(f"{container.url}/ping").status_code == 200
        served = {model["name"] for model in httpx.get(f"{container.url}/info").json()["models"]}
        assert "bert" in served
        assert not any(name.startswith("cloze-") for name in served)
        body = {"input": "the king", "model": "bert"}
        answer = httpx.post(f"{container.url}/invocations", json=body).json()
        assert len(answer["data"]) == 1
        assert container.stop() == 0


def test_the_export_image_exports_what_the_serving_image_serves(
    cpu_image: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    exporter = build_export(tmp_path)
    try:
        checkpoint = readable_copy(checkpoints["bert"], tmp_path / "checkpoint")
        bundles = tmp_path / "bundles"
        bundles.mkdir(mode=0o777)
        bundles.chmod(0o777)
        volumes = ("--volume", f"{checkpoint}:/checkpoint:ro", "--volume", f"{bundles}:/bundles")
        command = ("export", "/checkpoint", "--name", "mine")
        done = containers.run(exporter, *command, options=("--network", "none", *volumes))
        assert done.stdout.startswith("mine@1 "), done.stdout + done.stderr
        listed = json.loads(output(exporter, "/opt/cloze/sbom.cdx.json", entrypoint="cat"))
        installed = json.loads(output(exporter, "-c", DISTRIBUTIONS))
        assert sorted([p["name"], p["version"]] for p in listed["components"]) == sorted(installed)
        with running_container(cpu_image, "--volume", f"{bundles}:/bundles:ro") as container:
            assert "fill-mask" in ask_every_task(container.url)
    finally:
        remove_image(exporter)


def test_the_gpu_image_needs_a_gpu_only_to_use_it() -> None:
    """Without a GPU the image starts on the CPU, or says in one line what is missing."""
    image = build("gpu")
    try:
        program = "import onnxruntime; print(onnxruntime.get_available_providers())"
        assert "CUDAExecutionProvider" in output(image, "-c", program)
        sbom = json.loads(output(image, "/opt/cloze/sbom.cdx.json", entrypoint="cat"))
        assert {"onnxruntime-gpu", "nvidia-cublas", "nvidia-cudnn-cu13"} <= {
            part["name"] for part in sbom["components"]
        }
        ended = containers.run(image, options=("--env", "CLOZE_DEVICE=cuda"), check=False)
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr.splitlines()[-1].startswith("cloze: ")
        with running_container(image, "--env", "CLOZE_DEVICE=auto") as container:
            assert "fill-mask" in ask_every_task(container.url)
    finally:
        remove_image(image)
