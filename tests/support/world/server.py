"""The server of a world: the real service with engines whose runs take simulated time."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from uvicorn.server import ServerState

from cloze.model_store import Bundle, Store
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import ArrayResult
from cloze.model_store.manifest import BundleSpec, Precision
from cloze.service.core import Device
from cloze.service.errors import StartupError
from cloze.service.server.process import _Server
from cloze.service.service import Service, single_process
from cloze.service.settings import Settings
from cloze.service.tasks import TASKS
from tests.support import task_model
from tests.support.world.kernel import Kernel, Process
from tests.support.world.network import Listener, Loop

NOISE = (0.93, 0.96, 0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.04, 1.08, 1.16, 1.4)
"""Durations of runs over their median, the quantiles of one run in twelve."""

POISON, BULK = "war", "moon"
"""Words of texts: one that the engine cannot run, and one that marks bulk requests."""

WORDS = [word for word in task_model.VOCABULARY if word.isalpha() and word not in (POISON, BULK)]

_MOST_TOKENS, _GOLDEN_TOKENS = 4096, 8


def publish(root: Path, *, is_bad: bool = False) -> str:
    """Publish the next version of the model, without weights; return its full name.

    The engine of a bad version does not open.
    """
    embedding = {"dimensions": 4, "pooling": "mean", "normalize": False, "max_tokens": _MOST_TOKENS}
    architecture = task_model.manifest().architecture.model_dump() | {"max_positions": _MOST_TOKENS}
    described = task_model.manifest(
        name="world", tasks=("embed",), heads={}, embedding=embedding, architecture=architecture,
        limits={"max_tokens": _MOST_TOKENS}, license="bad" if is_bad else None,
    )  # fmt: skip
    fields = {name: getattr(described, name) for name in BundleSpec.model_fields}
    store = Store(root)
    with store.staging() as folder:
        for file in described.files:
            (folder / file).write_text("world")
        task_model.CONTEXT.tokenizer._backend.save(str(folder / "tokenizer.json"))
        return store.publish(folder, BundleSpec(**fields)).manifest.reference


def vector(text: str, version: int) -> list[float]:
    """Return the vector that the engine of a version gives for a text."""
    ids = [task_model.CLS, *map(task_model.ID.__getitem__, text.split()), task_model.SEP]
    return _vector(np.array(ids), version).tolist()


def _vector(ids: Any, version: int) -> Any:
    order = ids @ np.arange(len(ids)) % 65_521  # exact as float32
    return np.array([ids.sum(), order, len(ids), version], np.float32)


@dataclass
class Costs:
    """What runs cost, and how they fail at present.

    Attributes:
        tokens_per_s: of one worker, at the recorded noise.
        overhead_s: of each run.
        slowness: factor of each run.
        error_share: share of the runs that raise.
        hangs: number of runs that will begin and not end.
        is_broken: whether the golden outputs are wrong, so that runs raise too.
    """

    tokens_per_s: float
    overhead_s: float = 0.002
    slowness: float = 1.0
    error_share: float = 0.0
    hangs: int = 0
    is_broken: bool = False


@dataclass(frozen=True)
class Run:
    """A run of an engine: when it ended, its tokens, those of bulk requests, and their waiting."""

    ended: float
    tokens: int
    bulk_tokens: int
    bulk_waits: bool


class Engine:
    """An engine whose runs sleep in simulated time; see `cloze.service.core.Engine`."""

    device, precision, reason = Device.CPU, Precision.FP32, "it is simulated"
    supports_varlen, adapters = False, None

    def __init__(self, server: "Server", bundle: Bundle) -> None:
        self._server, self.version = server, bundle.manifest.version
        self._kernel, self._costs = server.kernel, server.costs

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        """Return the vectors of the encodings after the time of the run."""
        kernel, costs, random = self._kernel, self._costs, self._kernel.random
        tokens = sum(len(encoding) for encoding in batch)
        self._hang(tokens)
        seconds = costs.overhead_s + tokens / costs.tokens_per_s
        kernel.sleep(seconds * costs.slowness * random.choice(NOISE))
        poison = task_model.ID[POISON]
        if costs.is_broken or random.random() < costs.error_share:
            raise RuntimeError("the device fails")
        if any(poison in encoding.input_ids for encoding in batch):
            raise RuntimeError("a poisoned encoding")
        bulk = sum(len(e) for e in batch if task_model.ID[BULK] in e.input_ids)
        self._server.ran(self, tokens, bulk)
        return [{"embedding": ArrayResult(_vector(e.input_ids, self.version))} for e in batch]

    def _hang(self, tokens: int) -> None:
        """Never return, if this run is to hang."""
        if self._costs.hangs:
            self._costs.hangs -= 1
            self._server.hung = self
            self._server.noted("hangs in a run of tokens", tokens)
            self._kernel.park()

    def probe(self) -> None:
        """Run the golden outputs."""
        self._hang(_GOLDEN_TOKENS)
        self._kernel.sleep(self._costs.overhead_s + _GOLDEN_TOKENS / self._costs.tokens_per_s)
        if self._costs.is_broken:
            raise RuntimeError("other golden outputs")


class Ordered(dict[Any, None]):
    """A set that keeps its order, in place of uvicorn's sets of connections and tasks."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


@dataclass
class Server:
    """The server of a world, which starts again when its process has ended.

    Attributes:
        turn_s: processor time of the event loop per callback.
        noted: called with what happens to the server, and a value.
        failed: called with an error that no code handles.
        downtime_s: seconds until the process starts again.
        listener: the socket to which clients connect.
        service: of the running process; None while it starts.
            runs: what the engines have run.
        hung: the engine of the last run that hangs.
    """

    kernel: Kernel
    costs: Costs
    turn_s: float
    noted: Callable[[str, Any], None]
    failed: Callable[[str], None]
    downtime_s: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)
    service: Service | None = None
    http: Any = None
    process: Process | None = None
    is_ending: bool = False
    runs: list[Run] = field(default_factory=list)
    hung: Engine | None = None

    def __post_init__(self) -> None:
        shared = Path("/dev/shm")
        self.store = Path(mkdtemp(prefix="world-", dir=shared if shared.is_dir() else None))
        publish(self.store / "models")
        self.listener = Listener(self.kernel)
        self.keeper = self.kernel.spawn(self._keep)

    def remove(self) -> None:
        shutil.rmtree(self.store)

    def _keep(self) -> None:
        """Start a process, again and again."""
        while not self.is_ending:
            self.process = self.kernel.process("server")
            self.listener = Listener(self.kernel)
            self.kernel.spawn(self._serve, self.process, process=self.process)
            self.process.ended.wait()
            self.service = None
            self.noted("ended", None)
            self.listener.abort()
            if not self.is_ending:
                self.kernel.sleep(self.downtime_s)

    def _serve(self, process: Process) -> None:
        """Serve as `serve_in_one_process` does."""
        loop = Loop(self.kernel, process, self.turn_s, self.failed)
        settings = Settings(
            model_store=self.store / "models", host="10.0.0.1", allow_anonymous=True, workers=2,
            **self.settings,
        )  # fmt: skip
        try:
            service = single_process(settings, self._make_engine, {"embed": TASKS["embed"]})
        except StartupError:
            self.noted("exit", 2)
            self.kernel.kill(process)
            return
        self.http = http = _Server(service, settings, lambda: self._started(service))
        http.server_state = ServerState()
        http.server_state.connections = Ordered()  # type: ignore[assignment]
        http.server_state.tasks = Ordered()  # type: ignore[assignment]
        loop.run_until_complete(http._serve([self.listener]))  # type: ignore[list-item]
        self.noted("exit", 0 if service.dead_reason is None else 1)
        self.kernel.kill(process)

    def _started(self, service: Service) -> None:
        self.service = service
        self.noted("ready", None)

    def _make_engine(self, bundle: Bundle, *_: object) -> Engine:
        self.kernel.sleep(0.1 + 0.2 * self.kernel.random.random())
        if bundle.manifest.license == "bad":
            raise StartupError("the golden outputs differ")
        return Engine(self, bundle)

    def serves(self, engine: Engine) -> bool:
        """Return whether the snapshot of now has an engine, or a process starts."""
        if self.service is None:
            return True
        models = self.service.snapshot.by_name.values()
        return any(model.queue._engine is engine for model in models)  # type: ignore[attr-defined]

    def ran(self, engine: Engine, tokens: int, bulk: int) -> None:
        """Record a run."""
        waits = False
        if self.service is not None:
            for model in self.service.snapshot.by_name.values():
                waits |= model.queue._queue.bulk_tokens > 0  # type: ignore[attr-defined]
        self.runs.append(Run(self.kernel.now, tokens, bulk, waits))
