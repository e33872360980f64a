"""Other processors than this machine's, emulated by QEMU: models are exported, opened and answered.

Answers are compared with those of this machine. What QEMU 7.2 lacks is not emulated: AVX-512, VNNI
and AMX.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from tokenizers import Tokenizer
from transformers import BertForPreTraining

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.manifest import Precision, Weights
from tests import tiny
from tests.adapter_folders import Recipe, write
from tests.crafted import Body, craft
from tests.serving import Server, running_server
from tests.test_wheel import NOT_SOURCE, build, pip
from tests.unit.export.families.test_against_transformers import save

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("one_thread"),
]

ROOT = Path(__file__).parents[1]
ARM64_ROOT = ROOT.parent / "shared" / "tools" / "arm64-root"
"""A program that makes a folder of Debian for aarch64; it may lie beside the checkout."""

PRETENDED = 'mount --bind "$0" "$1" && shift && exec "$@"'
"""Lets a command read another file in the place of a file."""

EXPORT = """
import json, sys
from pathlib import Path
import torch
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.manifest import Precision, Weights
torch.set_num_threads(1)
for name, checkpoint, tasks, weights, adapters in json.loads(sys.argv[2]):
    options = ExportOptions(
        tasks=tuple(tasks), precisions=(Precision.INT8,), weights=Weights(weights),
        adapters=tuple(adapters),
    )
    export(checkpoint, name, Store(Path(sys.argv[1])), options)
"""
TIED = ("fill-mask", "sparse", "embed")
"""Tasks of which two multiply with the word embeddings."""


@dataclass(frozen=True)
class Processor:
    """A processor of x86, by QEMU's name, and its instructions by Linux's names."""

    name: str
    flags: str
    precision: Precision
    """What ``auto`` chooses."""


X86 = (
    Processor("Nehalem", "sse4_2", Precision.FP32),
    Processor("Haswell", "sse4_2 avx avx2 fma", Precision.INT8),
)
ARM64 = (
    Processor("neoverse-n1", "fp asimd asimddp", Precision.INT8),
    Processor("cortex-a72", "fp asimd", Precision.FP32),
)


@dataclass(frozen=True)
class Models:
    """Bundles of a store, the checkpoints that they were made from, and an adapter.

    Attributes:
        cases: the arguments of each export, as `EXPORT` reads them.
        masks: the mask token of each model that fills masks.
    """

    folder: Path
    cases: list[tuple[str, str, tuple[str, ...], str, tuple[str, ...]]]
    masks: dict[str, str]

    @property
    def store(self) -> Path:
        return self.folder / "store"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Models:
    """One model of each kind of attention, and all graphs in which products share weights."""
    folder = tmp_path_factory.mktemp("models")
    checkpoints = folder / "checkpoints"
    bert = tiny.save_checkpoint(checkpoints / "bert", "bert")
    for family in ("mpnet", "deberta-v2", "modernbert", "albert"):
        save(family, "masked_lm", checkpoints / family)
    cases = [
        ("bert-int8", str(bert), TIED, Weights.INT8.value, ()),
        ("base", str(bert), TIED, Weights.FP32.value, ("all-linear",)),
        ("albert", str(checkpoints / "albert"), ("embed",), Weights.FP32.value, ()),
        *(
            (family, str(checkpoints / family), TIED, Weights.FP32.value, ())
            for family in ("mpnet", "deberta-v2", "modernbert")
        ),
    ]
    masks = dict.fromkeys(("bert-int8", "base"), "[MASK]")
    for name, checkpoint, tasks, weights, adapters in cases:
        options = ExportOptions(
            tasks=tasks,
            precisions=(Precision.INT8,),
            weights=Weights(weights),
            adapters=adapters,
        )
        export(checkpoint, name, Store(folder / "store"), options)
        if (file := Path(checkpoint) / "tokenizer.json").exists() and "fill-mask" in tasks:
            tokenizer = Tokenizer.from_file(str(file))
            masks[name] = next(m for m in ("[MASK]", "<mask>") if tokenizer.token_to_id(m))
    network = BertForPreTraining.from_pretrained(bert).eval()
    write(folder / "adapters" / "vectors", Recipe(5, rank=6), network)
    return Models(folder, cases, masks)


def answers(server: Server, models: Models) -> dict[str, np.ndarray]:
    """Return the numbers of every model's answers, and those of the adapter."""

    def ask(route: str, body: dict[str, Any]) -> Any:
        response = httpx.post(f"{server.url}{route}", json=body, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()

    texts = ["The old king sang.", "A cat sat on the mat, and it was red. " * 3]
    found = {}
    for name in [*(case[0] for case in models.cases), "vectors"]:
        found[f"{name} embed"] = np.array(ask("/embed", {"inputs": texts, "model": name}))
    for name, mask in models.masks.items():
        body = {"inputs": f"the {mask} was red", "model": name}
        found[f"{name} fill-mask"] = np.array([row["score"] for row in ask("/fill-mask", body)])
        rows = ask("/embed_sparse", {"inputs": texts, "model": name})
        found[f"{name} sparse"] = np.array([sum(e["value"] for e in row) for row in rows])
    return found


def serve(models: Models, precision: str, *command: str, root: Path = Path("/")) -> Any:
    """Serve the models and the adapter; paths are those below a root."""
    adapter = "/" / (models.folder / "adapters" / "vectors").relative_to(root)
    served = ("--precision", precision, "--adapter", str(adapter), "--workers", "1")
    return running_server("/" / models.store.relative_to(root), *served, command=command)


@pytest.fixture(scope="module")
def here(models: Models) -> dict[str, dict[str, np.ndarray]]:
    """The answers of this machine, by precision."""
    found = {}
    for precision in ("fp32", "int8"):
        with serve(models, precision) as server:
            found[precision] = answers(server, models)
    return found


def assert_alike(
    precision: str, ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]
) -> None:
    """Check that numbers differ by little of their length: the last digit may round differently.

    In int8, the next integer of an activation then differs too. A sum that overflows is far off.
    """
    most = 1e-4 if precision == Precision.FP32 else 2e-2
    assert ours.keys() == theirs.keys()
    distances = {
        name: float(np.linalg.norm(theirs[name] - numbers) / np.linalg.norm(numbers))
        for name, numbers in ours.items()
    }
    assert max(distances.values()) < most, distances


def cpu_info(flags: str) -> str:
    """Return a file of processors with such instructions."""
    kind = "Features" if "asimd" in flags else "flags"
    return "".join(f"processor\t: {core}\n{kind}\t: {flags}\n\n" for core in range(2))


def pretending(file: Path, place: Path) -> tuple[str, ...]:
    """Return the start of a command that reads ``file`` in ``place``, or skip the test."""
    command = (
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        PRETENDED,
        str(file),
        str(place),
    )
    try:
        done = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed: no other /proc/cpuinfo can be shown")
    if done.returncode:
        pytest.skip(f"no other /proc/cpuinfo can be shown: {done.stderr.strip()}")
    return command


@pytest.fixture(params=X86, ids=lambda processor: processor.name)
def x86(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Processor, tuple[str, ...]]:
    """A processor, and the start of a command that runs Python there."""
    if os.uname().machine != "x86_64":
        pytest.skip("this machine is no x86_64")
    if shutil.which("qemu-x86_64") is None:
        pytest.skip("qemu-x86_64 is not installed (Debian's package qemu-user)")
    processor: Processor = request.param
    (tmp_path / "cpuinfo").write_text(cpu_info(processor.flags))
    start = pretending(tmp_path / "cpuinfo", Path("/proc/cpuinfo"))
    return processor, (*start, "qemu-x86_64", "-cpu", processor.name, sys.executable)


def test_an_older_x86_opens_bundles_and_answers_alike(
    x86: tuple[Processor, tuple[str, ...]], models: Models, here: dict[str, dict[str, np.ndarray]]
) -> None:
    _, python = x86
    for precision, ours in here.items():
        with serve(models, precision, *python, "-m", "cloze", "serve") as server:
            assert_alike(precision, ours, answers(server, models))


def test_an_older_x86_exports(
    x86: tuple[Processor, tuple[str, ...]],
    models: Models,
    here: dict[str, dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    processor, python = x86
    made = Models(tmp_path, models.cases, models.masks)
    shutil.copytree(models.folder / "adapters", tmp_path / "adapters")
    subprocess.run(
        [*python, "-c", EXPORT, str(made.store), json.dumps(models.cases)],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=840,
    )
    with serve(made, "auto", *python, "-m", "cloze", "serve") as server:
        assert_alike(processor.precision, here[processor.precision], answers(server, models))


def merge_names(folder: Path, _: Body) -> None:
    """Let all products of one weight read it by one name, as older versions wrote graphs."""
    file = folder / "dense-int8.onnx"
    model = onnx.load(file, load_external_data=False)
    places: dict[str, str] = {}
    first = {}
    for weight in model.graph.initializer:
        place = str(sorted((entry.key, entry.value) for entry in weight.external_data))
        first[weight.name] = places.setdefault(place, weight.name) if place != "[]" else weight.name
    kept = [weight for weight in model.graph.initializer if first[weight.name] == weight.name]
    assert len(kept) < len(first)
    for node in model.graph.node:
        node.input[:] = [first.get(name, name) for name in node.input]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    onnx.save_model(model, file)


@pytest.mark.parametrize("x86", X86[1:], ids=lambda one: one.name, indirect=True)
def test_an_int8_graph_of_an_older_version_gives_way_to_fp32_on_avx2(
    x86: tuple[Processor, tuple[str, ...]], models: Models, tmp_path: Path
) -> None:
    _, python = x86
    craft(models.store / "base" / "1", tmp_path / "store", merge_names)
    with running_server(tmp_path / "store", command=(*python, "-m", "cloze", "serve")) as server:
        assert "export the model again" in "".join(server.log)
        body = {"inputs": "The old king sang."}
        assert httpx.post(f"{server.url}/embed", json=body, timeout=60).status_code == 200


@pytest.fixture
def arm64() -> Iterator[Path]:
    """Make a folder of Debian for aarch64, with the wheels of the image and our own.

    The folder takes minutes, and is kept; what is installed in it is not.
    """
    if not ARM64_ROOT.exists():
        pytest.skip("no program beside the checkout makes a folder of Debian for aarch64")
    if os.geteuid():
        pytest.skip("a folder of Debian for aarch64 is made by root only")
    root = Path(gettempdir(), "cloze-arm64", "root")
    root.parent.mkdir(exist_ok=True)
    with Path(root.parent, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of pytest has the same folder
        yield from installed(root)


def installed(root: Path) -> Iterator[Path]:
    """Install the packages in the folder; yield the place."""
    subprocess.run([ARM64_ROOT, root], check=True, timeout=800, capture_output=True)
    with TemporaryDirectory(dir=root / "opt") as folder:
        source, site = Path(folder, "source"), Path(folder, "site")
        shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_SOURCE)
        target = ("--no-deps", "--target", str(site))
        pip("install", "--no-index", *target, str(build(source, source.parent)))
        tags = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)]
        platforms = [f"--platform={tag}" for tag in (*tags, "manylinux2014_aarch64")]
        lock = ("--require-hashes", "-r", str(ROOT / "requirements-image-cpu.lock"))
        version = ("--only-binary=:all:", "--implementation=cp", "--python-version=3.11")
        pip("install", *version, *platforms, *target, *lock)
        yield site
    subprocess.run([ARM64_ROOT, "--close", root], check=True, timeout=60)


@pytest.mark.parametrize("processor", ARM64, ids=lambda processor: processor.name)
def test_aarch64_opens_bundles_of_x86_and_answers_alike(
    arm64: Path,
    processor: Processor,
    models: Models,
    here: dict[str, dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    """Also the default bundles, in the precision that the processor runs faster."""
    root = arm64.parents[2]
    copied = Models(arm64.parent / "models", models.cases, models.masks)
    shutil.copytree(models.folder, copied.folder)
    (tmp_path / "cpuinfo").write_text(cpu_info(processor.flags))
    chroot = (*pretending(tmp_path / "cpuinfo", root / "proc/cpuinfo"), "chroot", str(root))
    variables = (f"QEMU_CPU={processor.name}", f"PYTHONPATH=/{arm64.relative_to(root)}")
    python = (*chroot, "env", *variables, "python3", "-m", "cloze", "serve")
    for precision, ours in here.items():
        with serve(copied, precision, *python, root=root) as server:
            assert_alike(precision, ours, answers(server, models))
    with running_server(None, command=python) as server:
        info = httpx.get(f"{server.url}/info", timeout=60).json()
        assert {model["precision"] for model in info["models"]} == {processor.precision}
        body = {"inputs": "The old king sang."}
        assert httpx.post(f"{server.url}/embed", json=body, timeout=60).status_code == 200
