"""Every sensible combination of overlays and components renders, is valid, and fits together."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as kubernetes

from cloze.model_store.locations import DEFAULT_ROOT
from cloze.model_store.manifest import Manifest
from cloze.service.server.process import _DRAIN_MARGIN_S
from cloze.service.settings import ENV_PREFIX, load_settings
from tests.support.command import call
from tests.support.kustomize import SCHEMAS, Object, check_restricted, of_kind, pod_of, rendered
from tests.support.serving import Server, running_server

ROOT = Path(__file__).parents[2]
OVERLAYS = ("cpu", "gpu", "local")
ALONE = (
    (),
    ("autoscaling",),
    ("keda",),
    ("monitoring",),
    ("keys",),
    ("keys", "ingress"),
    ("keys", "route"),
    ("models",),
    ("store",),
    ("bundle-image",),
    ("tls", "monitoring"),
)
MANY = ("keys", "monitoring-with-key", "ingress", "models", "traces", "tls")
COMBINATIONS = [
    *(("cpu", components) for components in ALONE),
    *(("cpu", (scaling, *MANY)) for scaling in ("autoscaling", "keda")),
    *((overlay, components) for overlay in OVERLAYS[1:] for components in ((), MANY)),
]

# The first version that has the sleep of preStop without a feature gate, and the newest known.
VERSIONS = ("1.30", kubernetes.latest_version())
Renders = dict[tuple[str, tuple[str, ...]], list[Object]]


def all_of(objects: list[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


@pytest.fixture(scope="module")
def renders(tmp_path_factory: pytest.TempPathFactory) -> Renders:
    """The objects of every combination."""
    root = tmp_path_factory.mktemp("k8s")
    return {
        (overlay, components): rendered(root, overlay, components)
        for overlay, components in COMBINATIONS
    }


def test_every_pod_passes_pod_security_restricted(renders: Renders) -> None:
    """All but those of the overlay local, which publish a port of the node."""
    for (overlay, _), objects in renders.items():
        if overlay != "local":  # one pod with a host port
            check_restricted(pod_of(objects))


def every_object_is_valid(objects: list[Object]) -> None:
    mounts_images = any("image" in volume for volume in pod_of(objects)["volumes"])
    for each in objects:
        if each["kind"] in SCHEMAS:
            jsonschema.validate(each, SCHEMAS[each["kind"]])
        else:
            for version in VERSIONS[mounts_images:]:  # the first version mounts no images
                kubernetes.validate(each, version, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


def the_settings_are_settings(objects: list[Object]) -> None:
    """The pods refer to the ConfigMap by its name with a hash, and the service accepts it."""
    settings = of_kind(objects, "ConfigMap")
    (container,) = pod_of(objects)["containers"]
    (source,) = container["envFrom"]
    assert source["configMapRef"]["name"] == settings["metadata"]["name"] != "cloze-settings"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings["data"].items():
            assert name.startswith(ENV_PREFIX)
            patch.setenv(name, value)
        loaded = load_settings()
    grace_s = pod_of(objects)["terminationGracePeriodSeconds"]
    sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain_s = loaded.drain_s + loaded.shutdown_grace_ms / 1000
    assert loaded.drain_s > 0, "preStop ends no open connection"
    assert sleep_s + drain_s + _DRAIN_MARGIN_S < grace_s


def ports_and_selectors_fit(objects: list[Object]) -> None:
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
    out = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    fetches = "initContainers" in pod_of(objects)
    collector = of_kind(objects, "ConfigMap")["data"].get("CLOZE_TRACES_ENDPOINT")
    wanted = {53} if fetches or collector else set()
    wanted |= {443} if fetches else set()
    wanted |= {urlsplit(collector).port} if collector else set()
    assert out == wanted, "names, what is fetched, and spans"
    service = of_kind(objects, "Service")
    for monitor in all_of(objects, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= service["metadata"]["labels"].items()
        assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]
    for each in all_of(objects, "Ingress"):
        (rule,) = each["spec"]["rules"]
        for path in rule["http"]["paths"]:
            assert path["backend"]["service"] == {"name": name, "port": {"name": port["name"]}}
    for each in all_of(objects, "HTTPRoute"):
        (rule,) = each["spec"]["rules"]
        (backend,) = rule["backendRefs"]
        assert (backend["name"], backend["port"]) == (name, port["port"])


def an_autoscaler_owns_the_replicas(objects: list[Object]) -> None:
    deployment = of_kind(objects, "Deployment")
    scalers = all_of(objects, "HorizontalPodAutoscaler", "ScaledObject")
    assert ("replicas" in deployment["spec"]) == (not scalers)
    for scaler in scalers:
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def secrets_are_mounted_where_the_settings_say(objects: list[Object]) -> None:
    """The keys, and the certificate; the files of a Secret of type TLS have fixed names."""
    settings = of_kind(objects, "ConfigMap")["data"]
    (container,) = pod_of(objects)["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    secrets = {v["name"]: v["secret"] for v in pod_of(objects)["volumes"] if "secret" in v}
    files = {"keys": {"KEYS_FILE": "keys.toml"}}
    files["tls"] = {"TLS_CERTIFICATE": "tls.crt", "TLS_KEY": "tls.key"}
    for name, by_setting in files.items():
        for setting, file in by_setting.items():
            assert settings.get(f"CLOZE_{setting}") == (
                f"{mounts[name]}/{file}" if name in secrets else None
            )
    assert secrets.keys() <= files.keys()
    for secret in secrets.values():
        assert secret["defaultMode"] == 0o440
        assert pod_of(objects)["securityContext"]["fsGroup"] == 10001


def all_ask_by_the_scheme_that_the_server_speaks(objects: list[Object]) -> None:
    speaks_tls = "CLOZE_TLS_KEY" in of_kind(objects, "ConfigMap")["data"]
    (container,) = pod_of(objects)["containers"]
    for kind in ("startup", "readiness", "liveness"):
        scheme = container[f"{kind}Probe"]["httpGet"].get("scheme", "HTTP")
        assert scheme == ("HTTPS" if speaks_tls else "HTTP")
    scheme = "https" if speaks_tls else "http"
    template = of_kind(objects, "Deployment")["spec"]["template"]
    assert template["metadata"]["annotations"]["prometheus.io/scheme"] == scheme
    assert of_kind(objects, "Service")["spec"]["ports"][0]["appProtocol"] == scheme
    for ingress in all_of(objects, "Ingress"):
        backend = "nginx.ingress.kubernetes.io/backend-protocol"
        assert ingress["metadata"]["annotations"].get(backend) == ("HTTPS" if speaks_tls else None)


def prometheus_has_a_key_where_the_server_has_keys(objects: list[Object]) -> None:
    has_keys = "CLOZE_KEYS_FILE" in of_kind(objects, "ConfigMap")["data"]
    for monitor in all_of(objects, "ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        assert ("authorization" in endpoint) == has_keys


def models_are_fetched_to_where_they_are_served_from(objects: list[Object]) -> None:
    settings = of_kind(objects, "ConfigMap")
    claims = all_of(objects, "PersistentVolumeClaim")
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


@pytest.mark.parametrize(
    "check",
    [
        every_object_is_valid,
        the_settings_are_settings,
        ports_and_selectors_fit,
        an_autoscaler_owns_the_replicas,
        secrets_are_mounted_where_the_settings_say,
        all_ask_by_the_scheme_that_the_server_speaks,
        prometheus_has_a_key_where_the_server_has_keys,
        models_are_fetched_to_where_they_are_served_from,
    ],
    ids=lambda check: check.__name__,
)
def test_in_every_combination(renders: Renders, check: Callable[[list[Object]], None]) -> None:
    for (overlay, components), objects in renders.items():
        try:
            check(objects)
        except Exception as error:
            error.add_note(f"in the overlay {'+'.join((overlay, *components))}")
            raise


def kserve_pod() -> Object:
    """Check both objects of KServe; return the pod that KServe makes of them."""
    service, runtime = (
        yaml.safe_load((ROOT / f"k8s/kserve/{name}.yaml").read_text())
        for name in ("inferenceservice", "servingruntime")
    )
    for each in (service, runtime):
        jsonschema.validate(each, SCHEMAS[each["kind"]])
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    (form,) = runtime["spec"]["supportedModelFormats"]
    assert predictor["model"]["modelFormat"]["name"] == form["name"]
    own = SCHEMAS["InferenceService"]["properties"]["spec"]["properties"]["predictor"]["properties"]
    spec = {name: value for name, value in predictor.items() if name not in own}
    return spec | {name: runtime["spec"][name] for name in ("containers", "volumes")}


def valid_pod(spec: Object) -> None:
    """Check the specification of a pod that no file has as an object."""
    check_restricted(spec)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "cloze"}, "spec": spec}
    for version in VERSIONS:
        kubernetes.validate(pod, version, strict=True)


def test_the_pod_of_kserve_is_valid() -> None:
    valid_pod(kserve_pod())


def test_the_pod_of_kserve_is_that_of_the_base(renders: Renders) -> None:
    """It drains as the other pods do, and serves the bundles that KServe has fetched."""
    pod, base = kserve_pod(), pod_of(renders["cpu", ()])
    (container,), (own) = pod["containers"], base["containers"][0]
    for field in ("lifecycle", "resources", "securityContext", "volumeMounts"):
        assert container[field] == own[field], field
    for field in ("terminationGracePeriodSeconds", "volumes", "enableServiceLinks"):
        assert pod[field] == base[field], field
    environment = {each["name"]: each["value"] for each in container["env"]}
    settings = of_kind(renders["cpu", ()], "ConfigMap")["data"]
    assert environment == settings | {"CLOZE_MODEL_STORE": "/mnt/models"}
    assert "CLOZE_ALLOW_ANONYMOUS" not in environment, "nothing here keeps others out"


def admitted(component: str) -> dict[str, bool]:
    """Return the paths that a component lets in, each with whether it is a prefix."""
    if component == "ingress":
        spec = yaml.safe_load((ROOT / "k8s/components/ingress/ingress.yaml").read_text())["spec"]
        paths = spec["rules"][0]["http"]["paths"]
        return {path["path"]: path["pathType"] == "Prefix" for path in paths}
    spec = yaml.safe_load((ROOT / "k8s/components/route/route.yaml").read_text())["spec"]
    matches = [match["path"] for match in spec["rules"][0]["matches"]]
    return {match["value"]: match["type"] == "PathPrefix" for match in matches}


@pytest.mark.parametrize("component", ["route", "ingress"])
def test_clients_from_outside_reach_all_that_is_for_them(
    servers: Callable[[tuple[str, ...]], Server], component: str
) -> None:
    """Every route of clients, the page with its parts, and what the page asks."""
    server, paths = servers(()), admitted(component)

    def is_admitted(path: str) -> bool:
        folders = ("/" + path.split("/")[1], path)
        return path in paths or any(paths.get(folder, False) for folder in folders)

    documented = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    for route, methods in documented.items():
        if "post" in methods and not route.startswith("/admin/"):
            assert is_admitted(route), route
    assert not is_admitted("/metrics")
    assert not is_admitted("/admin/reload")
    own = {"/", "/docs", "/openapi.json"}
    exact = {path for path, is_prefix in paths.items() if not is_prefix}
    assert exact <= documented.keys() | own, "a path that the server does not have"

    wanted, parts = ["/"], set()
    while wanted:
        part = wanted.pop()
        answer = httpx.get(server.url + part, headers={"accept": "text/html,*/*"})
        assert answer.status_code == 200, part
        assert is_admitted(part), part
        parts.add(part)
        named = re.findall(r'(?:href|src|from|url)[=:]? ?"([\w./-]+)"', answer.text)
        found = {urljoin(part, name) for name in named} - {"/metrics"}
        wanted += sorted(found - parts - set(wanted))
    assert {"/page/page.js", "/page/live.js", "/page/style.css", "/docs"} <= parts


@pytest.mark.slow
def test_packed_weights_fit_the_volume_twice(renders: Renders, tmp_path: Path) -> None:
    """While a reload replaces the models, the old ones still have their files, without a name."""
    manifests = [
        json.loads(file.read_text()) for file in DEFAULT_ROOT.glob("cloze-*/*/manifest.json")
    ]
    for each in manifests:
        del each["digest"]
    parameters = sum(Manifest.model_validate(m).architecture.parameters for m in manifests)
    names = ",".join(each["name"] for each in manifests)
    environment = {"TMPDIR": str(tmp_path), "CLOZE_PRECISION": "fp32", "CLOZE_MODEL": names}
    with running_server(DEFAULT_ROOT, **environment) as server:
        maps = Path(f"/proc/{server.process.pid}/maps").read_text().splitlines()
    ends: dict[str, int] = {}
    for line in (each for each in maps if str(tmp_path) in each):
        addresses, _, offset, _, inode, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        ends[inode] = max(ends.get(inode, 0), int(offset, 16) + end - start)
    assert len(ends) == len(manifests), "a file per model"
    assert 2 * sum(ends.values()) <= 2 * 8 * parameters < 2 * 2**30
    (volume,) = [each for each in pod_of(renders["cpu", ()])["volumes"] if each["name"] == "tmp"]
    assert volume["emptyDir"]["sizeLimit"] == "2Gi"


def test_a_gpu_pod_gets_a_gpu_and_refuses_to_run_without(renders: Renders) -> None:
    objects = renders["gpu", ()]
    (container,) = pod_of(objects)["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert of_kind(objects, "ConfigMap")["data"]["CLOZE_DEVICE"] == "cuda"
    assert pod_of(objects)["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_the_bulk_run_is_valid() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian's package kubernetes-client)")
    done = call("kubectl", "kustomize", str(ROOT / "k8s/bulk"), timeout=60)
    objects = list(yaml.safe_load_all(done.stdout))
    job, claim = (of_kind(objects, kind) for kind in ("RayJob", "PersistentVolumeClaim"))
    jsonschema.validate(job, SCHEMAS["RayJob"])
    assert job["spec"]["submissionMode"] == "HTTPMode", "the operator's pod for a submission fails"
    for version in VERSIONS:
        kubernetes.validate(claim, version, strict=True)
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len(groups) == 2
    for spec in (group["template"]["spec"] for group in groups):
        valid_pod(spec)
        (container,) = spec["containers"]
        assert container["image"] == "registry.example/cloze:bulk"
        (volume,), (mount,) = spec["volumes"], container["volumeMounts"]
        assert volume["name"] == mount["name"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "the workers of all machines write"
