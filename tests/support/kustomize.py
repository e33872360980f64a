"""Overlays of k8s/ with components, rendered by kubectl."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import yaml

from tests.support.command import call

ROOT = Path(__file__).parents[2]

Object = dict[str, Any]

SCHEMAS = {file.stem: json.loads(file.read_text()) for file in (ROOT / "tests/schemas").iterdir()}


def rendered(folder: Path, overlay: str, components: Sequence[str]) -> list[Object]:
    """Return the objects of an overlay with components; the folder gets a copy of k8s/."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian's package kubernetes-client)")
    if not (folder / "k8s").exists():
        shutil.copytree(ROOT / "k8s", folder / "k8s")
    mine = Path(mkdtemp(dir=folder))
    body = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"../k8s/overlays/{overlay}"],
        "components": [f"../k8s/components/{name}" for name in components],
    }
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(body))
    done = call("kubectl", "kustomize", str(mine), timeout=60)
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: list[Object], kind: str) -> Object:
    """Return the only object of a kind."""
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def pod_of(objects: list[Object]) -> Object:
    spec: Object = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image"}
VOLUMES |= {"persistentVolumeClaim", "projected", "secret"}


def check_restricted(pod: Object) -> None:
    """Check the specification of a pod against the profile restricted of Pod Security."""
    context = pod.get("securityContext", {})
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        own = container.get("securityContext", {})
        assert own["allowPrivilegeEscalation"] is False
        assert "ALL" in own["capabilities"]["drop"]
        assert set(own["capabilities"].get("add", ())) <= {"NET_BIND_SERVICE"}
        assert not own.get("privileged", False)
        assert own.get("runAsNonRoot", context.get("runAsNonRoot")) is True
        # Without it, the kubelet refuses an image whose user has a name.
        assert own.get("runAsUser", context.get("runAsUser")) > 0
        seccomp = own.get("seccompProfile", context.get("seccompProfile"))
        assert seccomp["type"] in ("RuntimeDefault", "Localhost")
        assert not any("hostPort" in port for port in container.get("ports", ()))
    assert not any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC"))
    for volume in pod.get("volumes", ()):
        assert volume.keys() - {"name"} <= VOLUMES
