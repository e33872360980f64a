"""The pods of k8s/, played by podman: the probes answer, and models are fetched onto a volume.

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

from tests.deploy.test_image import build_export
from tests.export.test_hub import COMMIT, FakeHub, hub  # noqa: F401  # a fixture
from tests.support import containers
from tests.support.containers import answers, call, podman
from tests.support.kustomize import of_kind
from tests.support.ports import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
NEVER_PULLED = {"op": "add", "path": "/imagePullPolicy", "value": "Never"}
BY_PORT = ("/startupProbe", "/readinessProbe", "/livenessProbe", "/ports")

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


def image(name: str, tagged: str) -> dict[str, str]:
    """Return the entry of a kustomization that replaces an image."""
    new_name, _, tag = tagged.rpartition(":")
    return {"name": name, "newName": new_name, "newTag": tag}


def patch(*operations: dict[str, Any]) -> dict[str, Any]:
    target = {"kind": "Deployment", "name": "cloze"}
    return {"target": target, "patch": yaml.safe_dump(list(operations))}


def in_container(kind: str, operation: dict[str, Any]) -> dict[str, Any]:
    return operation | {"path": f"/spec/template/spec/{kind}/0{operation['path']}"}


@contextmanager
def played(pods: Path, *options: str) -> Iterator[None]:
    """Play a file of pods; remove them at the end, but not their volumes."""
    try:
        done = call(podman(), "kube", "play", *options, str(pods), check=False, timeout=300)
        assert done.returncode == 0, done.stderr + logs_of(pods)
        yield
    finally:
        call(podman(), "kube", "down", str(pods), check=False)


def play_once(pods: Path) -> None:
    """Turn the Deployment of a file into its pod: podman 4.3 restarts an init container that ended
    well, because a Deployment restarts its containers.
    """
    objects = list(yaml.safe_load_all(pods.read_text()))
    for each in objects:
        if each["kind"] == "Deployment":
            template = each["spec"]["template"]
            each |= {"apiVersion": "v1", "kind": "Pod"}
            each["spec"] = template["spec"] | {"restartPolicy": "Never"}
    pods.write_text(yaml.safe_dump_all(objects))


def without_claim(pods: Path) -> None:
    """Remove the claim from a file: podman keeps its volume, and refuses to create it again."""
    objects = yaml.safe_load_all(pods.read_text())
    kept = [each for each in objects if each["kind"] != "PersistentVolumeClaim"]
    pods.write_text(yaml.safe_dump_all(kept))


def logs_of(pods: Path) -> str:
    """Return what the containers of a file of pods have printed."""
    (pod,) = [
        each
        for each in yaml.safe_load_all(pods.read_text())
        if each["kind"] in ("Deployment", "Pod")
    ]
    named = f"name={pod['metadata']['name']}"
    listed = call(podman(), "ps", "--all", "--quiet", "--filter", named, check=False)
    logs = [call(podman(), "logs", each, check=False) for each in listed.stdout.split()]
    return "".join(log.stdout + log.stderr for log in logs)


@pytest.mark.parametrize("resource", ["base", "overlays/local"])
def test_the_probes_of_a_pod_answer(cpu_image: str, tmp_path: Path, resource: str) -> None:
    port = free_port()
    host_port = {"op": "add", "path": "/ports/0/hostPort", "value": port}
    name = "localhost/cloze" if resource == "overlays/local" else "cloze"
    pods = rendered(
        tmp_path,
        resource,
        images=[image(name, cpu_image)],
        patches=[
            patch(in_container("containers", host_port), in_container("containers", NEVER_PULLED))
        ],
    )
    deployment = of_kind([*yaml.safe_load_all(pods.read_text())], "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    with played(pods):
        url = f"http://127.0.0.1:{port}"
        for kind in ("startup", "readiness", "liveness"):
            path = container[f"{kind}Probe"]["httpGet"]["path"]
            wait_until(lambda path=path: answers(url + path), 60)  # type: ignore[misc]
        assert httpx.post(f"{url}/embed", json={"inputs": "a"}).status_code == 200
        assert answers(f"{url}/metrics")


def test_a_pod_fetches_its_model_once(
    cpu_image: str,
    hub: FakeHub,  # noqa: F811
    tmp_path: Path,
) -> None:
    """With the host's network, so that the pod reaches the hub on loopback."""
    exporter = build_export(tmp_path)
    port = free_port()
    literals = [
        f"CLOZE_MODEL=hub:tiny/bert@{COMMIT}",
        "CLOZE_HOST=127.0.0.1",
        f"CLOZE_PORT={port}",
        "CLOZE_ALLOW_ANONYMOUS=1",
    ]
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    hub_at = [{"name": name, "value": value} for name, value in variables.items()]
    owner = {"value": {f"volume.podman.io/{kind}": "10001" for kind in ("uid", "gid")}}
    pods = rendered(
        tmp_path,
        "base",
        components=["../k8s/components/models"],
        images=[image("cloze", cpu_image), image("cloze-export", exporter)],
        configMapGenerator=[{"name": "cloze-settings", "behavior": "merge", "literals": literals}],
        patches=[
            patch(
                in_container("containers", NEVER_PULLED),
                in_container("initContainers", NEVER_PULLED),
                # podman 4.3 passes no variables of an optional Secret.
                in_container("initContainers", {"op": "add", "path": "/env", "value": hub_at}),
                # podman publishes no port of the host's network, and the probes name the port.
                *(in_container("containers", {"op": "remove", "path": path}) for path in BY_PORT),
            ),
            # podman takes the owner of a volume from here, not from fsGroup.
            {
                "target": {"kind": "PersistentVolumeClaim"},
                "patch": yaml.safe_dump([{"op": "add", "path": "/metadata/annotations"} | owner]),
            },
        ],
    )
    play_once(pods)
    claim = of_kind([*yaml.safe_load_all(pods.read_text())], "PersistentVolumeClaim")
    url = f"http://127.0.0.1:{port}"
    try:
        asked = []
        for _ in range(2):
            with played(pods, "--network", "host"):
                wait_until(lambda: answers(f"{url}/readyz"), 120)
                models = httpx.get(f"{url}/info").json()["models"]
                assert [model["name"] for model in models] == ["bert"]
                assert models[0]["source"]["revision"] == COMMIT
                assert httpx.post(f"{url}/embed", json={"inputs": "a"}).status_code == 200
            asked.append(len(hub.asked))
            without_claim(pods)
        assert asked[0] == asked[1] > 0, "the second start asked the hub"
    finally:
        # podman 4.3 keeps the empty folder of an init container as a volume of its name.
        call(podman(), "volume", "rm", "--force", claim["metadata"]["name"], "fetch", check=False)
        containers.remove_image(exporter)
