"""Every sensible combination of overlays and components renders, is valid, and fits together."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import httpx
import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as kubernetes

from cloze.bulk_command import bulk
from cloze.service.settings import ENV_PREFIX, load_settings
from tests.serving import Server

ROOT = Path(__file__).parents[1]
OVERLAYS = ("cpu", "gpu", "local")
SCALING = ((), ("autoscaling",), ("keda",))
FURTHER = (
    (),
    ("monitoring",),
    ("keys",),
    ("keys", "ingress"),
    ("models",),
    ("monitoring", "keys", "ingress", "models"),
)
COMBINATIONS = [
    (overlay, (*scaling, *further))
    for overlay, scaling, further in itertools.product(OVERLAYS, SCALING, FURTHER)
    if not (overlay == "local" and scaling)  # one pod with a host port cannot be scaled
]
SCHEMAS = {file.stem: json.loads(file.read_text()) for file in (ROOT / "tests/schemas").iterdir()}

# The first version that has the sleep of preStop without a feature gate, and the newest known.
VERSIONS = ("1.30", kubernetes.latest_version())

Object = dict[str, Any]


@pytest.fixture(scope="module")
def renders(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, tuple[str, ...]], list[Object]]:
    """The objects of every combination."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian's package kubernetes-client)")
    root = tmp_path_factory.mktemp("k8s")
    shutil.copytree(ROOT / "k8s", root / "k8s")
    rendered = {}
    for number, (overlay, components) in enumerate(COMBINATIONS):
        folder = root / f"mine-{number}"
        folder.mkdir()
        body = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"../k8s/overlays/{overlay}"],
            "components": [f"../k8s/components/{name}" for name in components],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(body))
        done = subprocess.run(
            ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (overlay, components, done.stderr)
        rendered[overlay, components] = list(yaml.safe_load_all(done.stdout))
    return rendered


@pytest.fixture(params=COMBINATIONS, ids=lambda c: "+".join((c[0], *c[1])))
def objects(
    request: pytest.FixtureRequest,
    renders: dict[tuple[str, tuple[str, ...]], list[Object]],
) -> list[Object]:
    """The objects of one combination."""
    return renders[request.param]


def of_kind(objects: list[Object], kind: str) -> Object:
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def pod_of(objects: list[Object]) -> Object:
    spec: Object = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(objects: list[Object], version: str) -> None:
    for each in objects:
        if each["kind"] in SCHEMAS:
            jsonschema.validate(each, SCHEMAS[each["kind"]])
        else:
            kubernetes.validate(each, version, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


def test_the_settings_are_settings(objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pods refer to the ConfigMap by its name with a hash, and the service accepts it."""
    settings = of_kind(objects, "ConfigMap")
    (container,) = pod_of(objects)["containers"]
    (source,) = container["envFrom"]
    assert source["configMapRef"]["name"] == settings["metadata"]["name"] != "cloze-settings"
    for name, value in settings["data"].items():
        assert name.startswith(ENV_PREFIX)
        monkeypatch.setenv(name, value)
    loaded = load_settings()
    grace_s = pod_of(objects)["terminationGracePeriodSeconds"]
    sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert sleep_s + loaded.shutdown_grace_ms / 1000 + 5 < grace_s


def test_ports_and_selectors_fit(objects: list[Object]) -> None:
    deployment = of_kind(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (container,) = pod_of(objects)["containers"]
    (port,) = container["ports"]
    policy = of_kind(objects, "NetworkPolicy")["spec"]
    selectors = [
        of_kind(objects, "Service")["spec"]["selector"],
        of_kind(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        policy["podSelector"]["matchLabels"],
        deployment["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
    assert {p["port"] for rule in policy["ingress"] for p in rule["ports"]} == {port["name"]}
    if pod_of(objects).get("initContainers"):
        ports = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
        assert ports == {53, 443}, "names, and what is fetched"
    else:
        assert policy["egress"] == []
    monitors = [each for each in objects if each["kind"] == "ServiceMonitor"]
    service = of_kind(objects, "Service")
    for monitor in monitors:
        wanted = monitor["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= service["metadata"]["labels"].items()
        assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    for ingress in (each for each in objects if each["kind"] == "Ingress"):
        (rule,) = ingress["spec"]["rules"]
        paths = {path["path"]: path["backend"]["service"] for path in rule["http"]["paths"]}
        assert not {"/metrics", "/admin"} & paths.keys()
        for backend in paths.values():
            assert backend["name"] == service["metadata"]["name"]
            assert backend["port"]["name"] == service["spec"]["ports"][0]["name"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_service_of_kserve_is_valid(version: str) -> None:
    """Its predictor is a pod with fields of its own, so the pod is checked apart from them."""
    service = yaml.safe_load((ROOT / "k8s/kserve/inferenceservice.yaml").read_text())
    jsonschema.validate(service, SCHEMAS["InferenceService"])
    own = SCHEMAS["InferenceService"]["properties"]["spec"]["properties"]["predictor"]["properties"]
    spec = {k: v for k, v in service["spec"]["predictor"].items() if k not in own}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "cloze"}, "spec": spec}
    kubernetes.validate(pod, version, strict=True)


def test_the_ingress_lets_in_every_route_of_clients(server: Server) -> None:
    ingress = yaml.safe_load((ROOT / "k8s/components/ingress/ingress.yaml").read_text())
    (rule,) = ingress["spec"]["rules"]
    paths = {path["path"]: path["pathType"] for path in rule["http"]["paths"]}
    documented = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    for route, methods in documented.items():
        if "post" in methods and not route.startswith("/admin/"):
            first = "/" + route.split("/")[1]
            assert paths.get(route) == "Exact" or paths.get(first) == "Prefix", route
    exact = {path for path, kind in paths.items() if kind == "Exact"}
    assert exact <= documented.keys(), "a path that the server does not have"


def test_an_autoscaler_owns_the_replicas(objects: list[Object]) -> None:
    deployment = of_kind(objects, "Deployment")
    scalers = [
        each for each in objects if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
    ]
    assert ("replicas" in deployment["spec"]) == (not scalers)
    for scaler in scalers:
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_keys_are_mounted_where_the_setting_says(objects: list[Object]) -> None:
    settings = of_kind(objects, "ConfigMap")["data"]
    (container,) = pod_of(objects)["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    secrets = {v["name"]: v["secret"] for v in pod_of(objects)["volumes"] if "secret" in v}
    if "CLOZE_KEYS_FILE" not in settings:
        assert not secrets
        return
    assert "cloze-models" not in secrets
    (name,) = secrets
    assert settings["CLOZE_KEYS_FILE"] == f"{mounts[name]}/keys.toml"
    assert secrets[name]["defaultMode"] == 0o440
    assert pod_of(objects)["securityContext"]["fsGroup"] == 10001


def test_models_are_fetched_to_where_they_are_served_from(objects: list[Object]) -> None:
    settings = of_kind(objects, "ConfigMap")
    claims = [each for each in objects if each["kind"] == "PersistentVolumeClaim"]
    if not pod_of(objects).get("initContainers"):
        assert not claims
        assert "CLOZE_MODEL_STORE" not in settings["data"]
        return
    (fetch,), (container,) = pod_of(objects)["initContainers"], pod_of(objects)["containers"]
    assert fetch["args"] == ["fetch"]
    assert fetch["envFrom"][0] == container["envFrom"][0], "the same CLOZE_MODEL"
    assert fetch["envFrom"][1]["secretRef"]["optional"]
    assert fetch["securityContext"] == container["securityContext"]
    store = settings["data"]["CLOZE_MODEL_STORE"]
    for each, read_only in ((fetch, False), (container, True)):
        (mount,) = [mount for mount in each["volumeMounts"] if mount["mountPath"] == store]
        assert mount.get("readOnly", False) == read_only
        (volume,) = [v for v in pod_of(objects)["volumes"] if v["name"] == mount["name"]]
        (claim,) = claims
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert pod_of(objects)["securityContext"]["fsGroup"] == 10001


def test_a_gpu_pod_gets_a_gpu_and_refuses_to_run_without(
    renders: dict[tuple[str, tuple[str, ...]], list[Object]],
) -> None:
    objects = renders["gpu", ()]
    (container,) = pod_of(objects)["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert of_kind(objects, "ConfigMap")["data"]["CLOZE_DEVICE"] == "cuda"
    assert pod_of(objects)["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_the_prometheus_rule_has_the_rules() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/make-prometheusrule", "--check"], timeout=60
    )
    assert done.returncode == 0, "run scripts/make-prometheusrule"
    rule = yaml.safe_load((ROOT / "k8s/components/monitoring/prometheusrule.yaml").read_text())
    rules = yaml.safe_load((ROOT / "monitoring/rules.yml").read_text())
    assert rule["spec"] == rules


# ---- a bulk run on Ray ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bulk_objects() -> list[Object]:
    """The objects of k8s/bulk."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian's package kubernetes-client)")
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "k8s/bulk")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def ray_pods(job: Object) -> list[Object]:
    """The specifications of the pods of a RayJob: of its head, and of its workers."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_bulk_run_is_valid(bulk_objects: list[Object], version: str) -> None:
    job = of_kind(bulk_objects, "RayJob")
    jsonschema.validate(job, SCHEMAS["RayJob"])
    claim = of_kind(bulk_objects, "PersistentVolumeClaim")
    kubernetes.validate(claim, version, strict=True)
    pods = ray_pods(job)
    assert len(pods) == 2
    for spec in pods:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": spec}
        kubernetes.validate(pod, version, strict=True)
        (container,) = spec["containers"]
        assert container["image"] == "registry.example/cloze:bulk"
        (volume,), (mount,) = spec["volumes"], container["volumeMounts"]
        assert volume["name"] == mount["name"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "the workers of all machines write"


def test_a_wrong_ray_job_is_refused(bulk_objects: list[Object]) -> None:
    job = json.loads(json.dumps(of_kind(bulk_objects, "RayJob")))
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 2
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(job, SCHEMAS["RayJob"])


def test_the_bulk_run_s_command_is_one(bulk_objects: list[Object]) -> None:
    """The command takes its arguments, reads and writes the volume, and its workers have room."""
    spec = of_kind(bulk_objects, "RayJob")["spec"]
    shell, flag, script = shlex.split(spec["entrypoint"])
    assert (shell, flag) == ("sh", "-c")
    name, group, task, *arguments = shlex.split(script.split("||")[0])
    assert (name, group) == ("cloze", "bulk")
    command = bulk.commands[task]
    values = command.make_context(task, arguments).params
    assert values["on_ray"]
    cluster = spec["rayClusterSpec"]
    _, *workers = ray_pods({"spec": spec})
    (container,) = workers[0]["containers"]
    mount = Path(container["volumeMounts"][0]["mountPath"])
    for path in (*values["paths"], values["output"]):
        assert path.is_relative_to(mount)
    cores = int(container["resources"]["limits"]["cpu"])
    room = cluster["workerGroupSpecs"][0]["minReplicas"] * (cores // values["ray_worker_cpus"])
    assert values["ray_workers"] == room
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["rayVersion"] == pinned[1]
    with pytest.raises(click.NoSuchOption):
        command.make_context(task, [*arguments, "--ray-actors", "3"])
