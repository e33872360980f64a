"""Overlays of k8s/ with components, rendered by kubectl."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]

Object = dict[str, Any]


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
    done = subprocess.run(
        ["kubectl", "kustomize", str(mine)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, (overlay, components, done.stderr)
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: list[Object], kind: str) -> Object:
    """Return the only object of a kind."""
    (found,) = [each for each in objects if each["kind"] == kind]
    return found
