"""Images that are built and containers that run, with podman or docker."""

import json
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from filelock import FileLock

from tests.support.command import call
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
BASE = "docker.io/library/python:3.11-slim"
TAG = "localhost/cloze-test"
REVISION = "0123456789abcdef" * 2 + "01234567"
HARDENED = (
    *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges"),
)
UNCHECKED = ("--no-healthcheck",)  # podman runs the check by systemd, which may not be there


def engine() -> str:
    """Return podman or docker, with the base image; skip the test if there is neither."""
    program = shutil.which("podman") or shutil.which("docker")
    if program is None:
        pytest.skip("neither podman nor docker is installed: no image is built")
    if call(program, "image", "inspect", BASE, check=False).returncode != 0:
        pulled = call(program, "pull", BASE, check=False, timeout=300)
        if pulled.returncode != 0:
            pytest.skip(f"the base image {BASE} is not here and cannot be pulled")
    return program


def podman() -> str:
    """Return podman; skip the test if it is not installed, since docker plays no pods."""
    program = engine()
    if Path(program).name != "podman":
        pytest.skip("podman is not installed: docker plays no pods")
    return program


def build(target: str, *options: str, file: str = "Dockerfile", timeout: float = 1500) -> str:
    """Build a target of a Dockerfile; return the image's name."""
    program, image = engine(), f"{TAG}:{target}"
    options = ("--network", "host", *options)
    if Path(program).name == "podman":
        options = ("--isolation", "chroot", "--format", "docker", *options)
    if file == "Dockerfile":
        options = ("--target", target, *options)
    words = ("build", "--tag", image, "--file", str(ROOT / file), *options, str(ROOT))
    earlier = _untagged(program)
    try:
        call(program, *words, timeout=timeout)
    finally:
        # podman keeps an image of each stage, which may have gigabytes. (--layers=false keeps none,
        # but removes the base image as well.)
        if stages := _untagged(program) - earlier:
            call(program, "rmi", *stages, check=False)
    return image


@contextmanager
def shared_image(folder: Path) -> Iterator[str]:
    """Have the image for a CPU: the first process builds it, the last one removes it.

    ``folder`` is common to the processes; a file in it counts those that have the image.
    """
    lock, count = FileLock(folder / "image.lock"), folder / "image-users"

    def users(change: int) -> int:
        number = int(count.read_text()) + change if count.exists() else change
        count.write_text(str(number))
        return number

    with lock:
        if users(+1) == 1:
            build("cpu", "--build-arg", f"REVISION={REVISION}")
    try:
        yield f"{TAG}:cpu"
    finally:
        with lock:
            if users(-1) == 0:
                remove_image(f"{TAG}:cpu")


def _untagged(program: str) -> set[str]:
    """Return the images without a name."""
    listed = call(program, "images", "--quiet", "--no-trunc", "--filter", "dangling=true")
    return set(listed.stdout.split())


def remove_image(image: str) -> None:
    """Remove an image that a test built."""
    call(engine(), "rmi", "--force", image, check=False)


def inspect(kind: str, name: str) -> dict[str, Any]:
    """Return what the engine says of an image or of a container."""
    (described,) = json.loads(call(engine(), kind, "inspect", name).stdout)
    return dict(described)


def output(image: str, *command: str, entrypoint: str = "python") -> str:
    """Return the standard output of a command in a fresh container."""
    return run(image, *command, options=("--entrypoint", entrypoint)).stdout


def run(
    image: str, *command: str, options: tuple[str, ...] = (), check: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Run a container to its end, hardened as a deployment is."""
    words = (*HARDENED, *UNCHECKED, *options, image, *command)
    return call(engine(), "run", "--rm", *words, check=check, timeout=300)


@dataclass
class Container:
    """A running container of a server."""

    name: str
    url: str

    def logs(self) -> str:
        """Return all that the container has printed."""
        done = call(engine(), "logs", self.name, check=False)
        return done.stdout + done.stderr

    def execute(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in the container."""
        return call(engine(), "exec", self.name, *command, check=False)

    def stop(self) -> int:
        """Send SIGTERM, as an orchestrator does; return the exit code."""
        call(engine(), "stop", "--time", "30", self.name)
        return int(inspect("container", self.name)["State"]["ExitCode"])

    def resident_bytes(self) -> int:
        """Return the resident memory of the container's first process."""
        pid = inspect("container", self.name)["State"]["Pid"]
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        (resident,) = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
        return int(resident) * 1024


@contextmanager
def running_container(
    image: str, *options: str, command: tuple[str, ...] = (), port: int = 8000
) -> Iterator[Container]:
    """Run a server in a container until the test ends; wait until it is ready."""
    name = f"cloze-test-{uuid.uuid4().hex[:12]}"
    words = (*HARDENED, *UNCHECKED, "--publish", f"127.0.0.1::{port}", *options, image, *command)
    call(engine(), "run", "--detach", "--name", name, *words)
    try:
        published = call(engine(), "port", name, str(port)).stdout.split()[-1]
        container = Container(name, f"http://{published}")
        wait_until_ready(container)
        yield container
    finally:
        call(engine(), "rm", "--force", name, check=False)


def wait_until_ready(container: Container, longest_s: float = 60) -> None:
    """Wait until the server admits requests."""

    def is_ready() -> bool:
        time.sleep(0.2)
        if inspect("container", container.name)["State"]["Status"] == "exited":
            pytest.fail(f"the server ended:\n{container.logs()}")
        return answers(f"{container.url}/readyz")

    wait_until(is_ready, longest_s)


def answers(url: str) -> bool:
    """Return whether a URL answers with status 200."""
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def build_export(folder: Path) -> str:
    """Build the export image with the build of torch that pip finds here."""
    (torch,) = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    ]
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    subprocess.run([*pip, torch], check=True, timeout=600)
    return build(
        "export", *("--volume", f"{wheels}:/wheels:ro", "--build-arg", "PIP_FIND_LINKS=/wheels")
    )
