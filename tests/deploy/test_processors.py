"""Other processors than this machine's, emulated by QEMU: bundles are opened and answer.

Answers are compared with those of this machine. What QEMU 7.2 lacks is not emulated: AVX-512, VNNI
and AMX.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import BertForPreTraining

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.manifest import Precision, Weights
from tests.support import tiny
from tests.support.adapter_folders import Recipe, write
from tests.support.command import call
from tests.support.family_checkpoints import save
from tests.support.serving import Server, running_server
from tests.support.wheels import NOT_SOURCE, build, pip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300.0
"""An emulated server starts in about 20 s of one core."""

ARM64_ROOT = os.environ.get("CLOZE_TEST_ARM64_ROOT")
"""A program that makes a Debian for aarch64 of the folder in its argument, which QEMU runs.

With ``--close`` before the folder, the program unmounts what it mounted there.
"""

PRETENDED = 'mount --bind "$0" "$1" && shift && exec "$@"'
"""Lets a command read another file in the place of a file."""

TIED = ("fill-mask", "sparse", "embed")
"""Tasks of which two multiply with the word embeddings."""

FAMILIES = ("mpnet", "deberta-v2", "modernbert", "albert", "mobilebert")
"""With BERT, one family of each kind of attention, and one whose layers share their weights."""

SHORT = {"max_position_embeddings": 20}
"""An export masks each token of its sentences, as far as the model reads them."""

NARROW = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}


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
    """A folder with a store of bundles and an adapter, and the tasks of each bundle."""

    folder: Path
    tasks: dict[str, tuple[str, ...]]

    @property
    def store(self) -> Path:
        return self.folder / "store"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Models:
    """One model of each kind of attention, and all graphs in which products share weights."""
    folder = tmp_path_factory.mktemp("models")
    made = Models(folder, {"bert-int8": TIED, "base": TIED} | dict.fromkeys(FAMILIES, ("embed",)))
    bert = tiny.save_checkpoint(folder / "bert", "bert", **SHORT, **NARROW)
    for name, tasks in made.tasks.items():
        checkpoint, own = bert, {}
        if name == "bert-int8":
            own = {"weights": Weights.INT8}
        elif name == "base":
            own = {"adapters": ("all-linear",)}
        else:
            checkpoint = folder / name
            save(name, "masked_lm", checkpoint, **SHORT)
        options = ExportOptions(tasks=tasks, precisions=(Precision.INT8,), **own)
        export(str(checkpoint), name, Store(made.store), options)
    network = BertForPreTraining.from_pretrained(bert).eval()
    write(folder / "adapters" / "vectors", Recipe(5, rank=6), network)
    return made


def answers(server: Server, models: Models) -> dict[str, np.ndarray]:
    """Return the numbers of every model's answers, and those of the adapter."""

    def ask(route: str, body: dict[str, Any]) -> Any:
        response = httpx.post(f"{server.url}{route}", json=body, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()

    texts = ["The old king sang.", "A cat sat on the mat, and it was red. " * 3]
    found = {}
    for name in [*models.tasks, "vectors"]:
        found[f"{name} embed"] = np.array(ask("/embed", {"inputs": texts, "model": name}))
    for name in (name for name, tasks in models.tasks.items() if tasks == TIED):
        body = {"inputs": "the [MASK] was red", "model": name}
        found[f"{name} fill-mask"] = np.array([row["score"] for row in ask("/fill-mask", body)])
        rows = ask("/embed_sparse", {"inputs": texts, "model": name})
        found[f"{name} sparse"] = np.array([sum(e["value"] for e in row) for row in rows])
    return found


def serve(models: Models, precision: str, *command: str, root: Path = Path("/")) -> Any:
    """Serve the models and the adapter; paths are those below a root."""
    adapter = "/" / (models.folder / "adapters" / "vectors").relative_to(root)
    served = ("--precision", precision, "--adapter", str(adapter), "--workers", "1")
    store = "/" / models.store.relative_to(root)
    return running_server(store, *served, command=command, start_timeout_s=START_TIMEOUT_S)


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
        done = call(*command, "true", check=False)
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
    # A variable may choose the kernels of this machine's processor for numpy.
    own_kernels = ("env", "-u", "OPENBLAS_CORETYPE", "qemu-x86_64", "-cpu", processor.name)
    return processor, (*start, *own_kernels, sys.executable)


def test_an_older_x86_opens_bundles_and_answers_alike(
    x86: tuple[Processor, tuple[str, ...]], models: Models, here: dict[str, dict[str, np.ndarray]]
) -> None:
    _, python = x86
    for precision, ours in here.items():
        with serve(models, precision, *python, "-m", "cloze", "serve") as server:
            assert_alike(precision, ours, answers(server, models))


@pytest.fixture(scope="module")
def arm64() -> Iterator[Path]:
    """Make a folder of Debian for aarch64, with the wheels of the image and our own.

    The folder takes minutes, and is kept; what is installed in it is not.
    """
    if ARM64_ROOT is None:
        pytest.skip("CLOZE_TEST_ARM64_ROOT names no program that makes a Debian for aarch64")
    if os.geteuid():
        pytest.skip("a folder of Debian for aarch64 is made by root only")
    root = Path(gettempdir(), "cloze-arm64", "root")
    root.parent.mkdir(exist_ok=True)
    with Path(root.parent, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of pytest has the same folder
        yield from installed(ARM64_ROOT, root)


def installed(program: str, root: Path) -> Iterator[Path]:
    """Install the packages in the folder; yield the place."""
    done = call(program, root, check=False, timeout=800)
    if done.returncode:
        pytest.skip(f"no Debian for aarch64 could be made: {done.stderr.strip()}")
    with ExitStack() as ending:
        ending.callback(subprocess.run, [program, "--close", root], check=True, timeout=60)
        folder = ending.enter_context(TemporaryDirectory(dir=root / "opt"))
        source, site = Path(folder, "source"), Path(folder, "site")
        shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_SOURCE)
        target = ("--no-deps", "--target", str(site))
        pip("install", "--no-index", *target, str(build(source, source.parent)))
        tags = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)]
        platforms = [f"--platform={tag}" for tag in (*tags, "manylinux2014_aarch64")]
        lock = ("--require-hashes", "-r", str(ROOT / "locks/cpu.txt"))
        version = ("--only-binary=:all:", "--implementation=cp", "--python-version=3.11")
        pip("install", *version, *platforms, *target, *lock)
        yield site


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
    copied = Models(arm64.parent / processor.name, models.tasks)
    shutil.copytree(models.folder, copied.folder)
    (tmp_path / "cpuinfo").write_text(cpu_info(processor.flags))
    chroot = (*pretending(tmp_path / "cpuinfo", root / "proc/cpuinfo"), "chroot", str(root))
    variables = (f"QEMU_CPU={processor.name}", f"PYTHONPATH=/{arm64.relative_to(root)}")
    python = (*chroot, "env", *variables, "python3", "-m", "cloze", "serve")
    for precision, ours in here.items():
        with serve(copied, precision, *python, root=root) as server:
            assert_alike(precision, ours, answers(server, models))
    with running_server(None, command=python, start_timeout_s=START_TIMEOUT_S) as server:
        info = httpx.get(f"{server.url}/info", timeout=60).json()
        assert {model["precision"] for model in info["models"]} == {processor.precision}
        body = {"inputs": "The old king sang."}
        assert httpx.post(f"{server.url}/embed", json=body, timeout=60).status_code == 200
