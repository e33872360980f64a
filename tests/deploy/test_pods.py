"""The pods of k8s/, played by podman: the probes answer.

podman ignores a NetworkPolicy, a PodDisruptionBudget and limits.
"""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.command import call
from tests.support.containers import answers, podman
from tests.support.kustomize import of_kind
from tests.support.ports import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def rendered(folder: Path, resource: str, **overlay: Any) -> Path:
    """Render an overlay of k8s/ under a name of its own; return the file."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian's package kubernetes-client)")
    shutil.copytree(ROOT / "k8s", folder / "k8s")
    mine = folder / "mine"
    mine.mkdir()
    body = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namePrefix": f"test-{uuid.uuid4().hex[:8]}-",
        "resources": [f"../k8s/{resource}"],
        "replicas": [{"name": "cloze", "count": 1}],  # a host port allows one pod
        **overlay,
    }
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(body))
    pods = folder / "pods.yaml"
    pods.write_text(call("kubectl", "kustomize", str(mine)).stdout)
    return pods


@contextmanager
def played(pods: Path, *options: str) -> Iterator[None]:
    """Play a file of pods; remove them at the end, but not their volumes."""
    try:
        done = call(podman(), "kube", "play", *options, str(pods), check=False, timeout=300)
        assert done.returncode == 0, done.stderr + logs_of(pods)
        yield
    finally:
        call(podman(), "kube", "down", str(pods), check=False)


def logs_of(pods: Path) -> str:
    """Return what the containers of a file of pods have printed."""
    pod = of_kind([*yaml.safe_load_all(pods.read_text())], "Deployment")
    named = f"name={pod['metadata']['name']}"
    listed = call(podman(), "ps", "--all", "--quiet", "--filter", named, check=False)
    logs = [call(podman(), "logs", each, check=False) for each in listed.stdout.split()]
    return "".join(log.stdout + log.stderr for log in logs)


@pytest.mark.parametrize("resource", ["base", "overlays/local"])
def test_the_probes_of_a_pod_answer(cpu_image: str, tmp_path: Path, resource: str) -> None:
    port = free_port()
    operations = [
        {"op": "add", "path": f"/spec/template/spec/containers/0/{field}", "value": value}
        for field, value in (("ports/0/hostPort", port), ("imagePullPolicy", "Never"))
    ]
    target = {"kind": "Deployment", "name": "cloze"}
    patches = [{"target": target, "patch": yaml.safe_dump(operations)}]
    name = "localhost/cloze" if resource == "overlays/local" else "cloze"
    new_name, _, tag = cpu_image.rpartition(":")
    images = [{"name": name, "newName": new_name, "newTag": tag}]
    pods = rendered(tmp_path, resource, images=images, patches=patches)
    deployment = of_kind([*yaml.safe_load_all(pods.read_text())], "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    with played(pods):
        url = f"http://127.0.0.1:{port}"
        for kind in ("startup", "readiness", "liveness"):
            path = container[f"{kind}Probe"]["httpGet"]["path"]
            wait_until(lambda path=path: answers(url + path), 60)  # type: ignore[misc]
        assert httpx.post(f"{url}/embed", json={"inputs": "a"}).status_code == 200
        assert answers(f"{url}/metrics")
