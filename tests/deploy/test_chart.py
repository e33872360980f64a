"""The Helm chart is what kustomize renders: with the defaults, and with each component."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as kubernetes

from tests.support.command import call
from tests.support.kustomize import SCHEMAS, Object, check_restricted, of_kind, pod_of, rendered

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
INSTALLER = ROOT.parent / "shared/tools/helm-and-kubectl"

_ALONE: dict[str, dict[str, Any]] = {
    "keys": {"keys": {"secret": "cloze-keys"}},
    "models": {"models": {"address": "hub:org/bert@1"}},
    "store": {"store": {"claim": "cloze-bundles"}},
    "bundle-image": {"store": {"image": "registry.example/my-bert:1"}},
    "route": {"route": {"gateway": "gateway"}},
    "autoscaling": {"autoscaling": {"enabled": True}},
}
_TOGETHER = ("keys", "models", "route", "autoscaling")
COMPONENTS: dict[tuple[str, ...], dict[str, Any]] = {
    (): {},
    **{(name,): values for name, values in _ALONE.items()},
    _TOGETHER: {name: _ALONE[name][name] for name in _TOGETHER},
}
"""The components of k8s/ that values stand for."""


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return helm, installed beside the tests if a script for that is there."""
    program = shutil.which("helm")
    if program is None and INSTALLER.exists():
        folder = tmp_path_factory.mktemp("bin")
        done = call(INSTALLER, folder, check=False, timeout=300)
        program = str(folder / "helm") if done.returncode == 0 else None
    if program is None:
        pytest.skip("helm is not installed, nor can it be: the chart is not rendered")
    return program


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian's package kubernetes-client)")
    folder = tmp_path_factory.mktemp("chart")
    script = ROOT / "scripts/make-chart"
    subprocess.run([sys.executable, script, folder], check=True, timeout=120)
    return folder


def templated(helm: str, chart: Path, values: Object, folder: Path) -> list[Object]:
    file = folder / "values.json"
    file.write_text(json.dumps(values))
    done = call(helm, "template", "any-name", chart, "--values", file, timeout=60)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """Return objects without what differs by design: the names that follow a content."""
    text = re.sub(r"cloze-settings-[a-z0-9]{10}", "cloze-settings", json.dumps(objects))
    objects = json.loads(text)
    template = of_kind(objects, "Deployment")["spec"]["template"]
    template["metadata"]["annotations"].pop("checksum/settings", None)
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


@pytest.mark.parametrize("components", COMPONENTS, ids="+".join)
def test_the_chart_is_what_kustomize_renders(
    helm: str, chart: Path, tmp_path: Path, components: tuple[str, ...]
) -> None:
    objects = templated(helm, chart, COMPONENTS[components], tmp_path)
    for each in objects:
        if each["kind"] not in SCHEMAS:
            kubernetes.validate(each, kubernetes.latest_version(), strict=True)
    expected = by_name(rendered(tmp_path, "cpu", components))
    if "models" in components:
        expected["ConfigMap", "cloze-settings"]["data"]["CLOZE_MODEL"] = "hub:org/bert@1"
        pod = expected["Deployment", "cloze"]["spec"]["template"]["spec"]
        pod["initContainers"][0]["image"] = "registry.example/cloze:export"
    assert by_name(objects) == expected
    check_restricted(pod_of(objects))


def test_values_reach_the_pods(helm: str, chart: Path, tmp_path: Path) -> None:
    resources = {"limits": {"memory": "3Gi"}}
    objects = templated(
        helm,
        chart,
        {
            "image": "registry.example/mine@sha256:0",
            "replicas": 5,
            "resources": resources,
            "tmpSize": "6Gi",
            "settings": {"CLOZE_BATCH_LATENCY_MS": 7},
            "keys": {"secret": "mine"},
            "route": {"gateway": "gate", "namespace": "edge", "host": "mine.example"},
        },
        tmp_path,
    )
    assert of_kind(objects, "Deployment")["spec"]["replicas"] == 5
    pod = pod_of(objects)
    assert pod["containers"][0]["image"] == "registry.example/mine@sha256:0"
    assert pod["containers"][0]["resources"]["limits"]["memory"] == "3Gi"
    assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "6Gi"
    assert pod["volumes"][1]["secret"]["secretName"] == "mine"
    settings = of_kind(objects, "ConfigMap")["data"]
    assert settings["CLOZE_BATCH_LATENCY_MS"] == "7"
    assert settings["CLOZE_DRAIN_S"] == "5", "the grace period of the pod depends on it"
    route = of_kind(objects, "HTTPRoute")["spec"]
    assert (route["parentRefs"][0]["name"], route["hostnames"]) == ("gate", ["mine.example"])
    assert "edge" in json.dumps(of_kind(objects, "NetworkPolicy"))


def test_changed_settings_replace_the_pods(helm: str, chart: Path, tmp_path: Path) -> None:
    changes: list[Object] = [{}, {"settings": {"CLOZE_DRAIN_S": "6"}}]
    changes += [{"models": {"address": f"hub:org/bert@{n}"}} for n in (1, 2)]
    templates = [
        json.dumps(
            of_kind(templated(helm, chart, each, tmp_path), "Deployment")["spec"]["template"]
        )
        for each in changes
    ]
    assert len(set(templates)) == len(changes)
    more = of_kind(templated(helm, chart, {"replicas": 9}, tmp_path), "Deployment")
    assert json.dumps(more["spec"]["template"]) == templates[0]


def test_the_chart_passes_lint_and_refuses_misspelt_values(helm: str, chart: Path) -> None:
    lint = [helm, "lint", "--strict", str(chart)]
    done = call(*lint, timeout=60)
    done = call(*lint, "--set", "replica=3", check=False, timeout=60)
    assert done.returncode != 0
    assert "replica" in done.stdout + done.stderr
