"""The server of a world: the real service with engines whose runs take simulated time."""

import json
import math
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import sha256
from operator import mul
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import numpy as np

from cloze.model_store import Bundle, Store
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import ArrayResult
from cloze.model_store.manifest import BundleSpec, Precision
from cloze.service.batching.admission import WaitLimits
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import Device
from cloze.service.errors import StartupError
from cloze.service.server.process import answer_http
from cloze.service.service import Service, single_process
from cloze.service.settings import Settings
from cloze.service.tasks import TASKS
from tests.support import task_model
from tests.support.sources import ROOT
from tests.support.world import adapters
from tests.support.world.disk import Disk
from tests.support.world.kernel import Kernel, Process
from tests.support.world.network import Listener, Loop

POISON, BULK = "war", "moon"
"""Words of texts: one that the engine cannot run, and one that marks bulk requests."""

WORDS = [word for word in task_model.VOCABULARY if word.isalpha() and word not in (POISON, BULK)]

_MOST_TOKENS, _GOLDEN_TOKENS = 4096, 8
_FILES = ("g.onnx", "a.onnx", "golden.json", "tokenizer.json")
_TOKENIZER = task_model.CONTEXT.tokenizer._backend.to_str()


@cache
def _spec(dimensions: int, is_bad: bool) -> BundleSpec:
    """Return what the model is, without weights."""
    embedding = {"pooling": "mean", "normalize": False, "max_tokens": _MOST_TOKENS}
    architecture = task_model.manifest().architecture.model_dump() | {"max_positions": _MOST_TOKENS}
    described = task_model.manifest(
        name="world", tasks=("embed",), heads={}, architecture=architecture,
        embedding=embedding | {"dimensions": dimensions},
        limits={"max_tokens": _MOST_TOKENS}, license="bad" if is_bad else None,
        adapters=adapters.SUPPORT,
        files={file: {"size": 1, "sha256": "0" * 64} for file in _FILES},
    )  # fmt: skip
    return BundleSpec(**{name: getattr(described, name) for name in BundleSpec.model_fields})


def publish(root: Path, dimensions: int, *, is_bad: bool = False) -> str:
    """Publish the next version of the model, without weights; return its full name.

    The engine of a bad version does not open.
    """
    store, spec = Store(root), _spec(dimensions, is_bad)
    with store.staging() as folder:
        for file in _FILES:
            (folder / file).write_text("world")
        (folder / "tokenizer.json").write_text(_TOKENIZER)
        return store.publish(folder, spec).manifest.reference


def vector(text: str, version: int, dimensions: int) -> list[float]:
    """Return the vector that the engine of a version gives for a text."""
    ids = [task_model.CLS, *map(task_model.ID.__getitem__, text.split()), task_model.SEP]
    order = sum(map(mul, ids, range(len(ids)))) % 65_521  # exact as float32
    return [*map(float, (sum(ids), order, len(ids), version)), *[0.0] * (dimensions - 4)]


def _vector(ids: Any, version: int, dimensions: int) -> Any:
    made = np.zeros(dimensions, np.float32)
    order = ids @ np.arange(len(ids)) % 65_521
    made[:4] = ids.sum(), order, len(ids), version
    return made


class Session(NamedTuple):
    """What runs of a recorded session cost: seconds, and ratios of which each run takes one."""

    fixed: float
    per_token: float
    per_pair: float
    ratios: Sequence[float]

    @classmethod
    def recorded(cls, name: str) -> "Session":
        """Return a session of the table that `scripts/engine-times` has recorded."""
        row = json.loads((ROOT / "tests/simulated/engine-times.json").read_text())["sessions"][name]
        return cls(*(us / 1e6 for us in row["us"]), [each / 1000 for each in row["permille"]])

    def seconds(self, lengths: Sequence[int]) -> float:
        """Return the typical time of a batch of sequences with so many tokens."""
        pairs = sum([length * length for length in lengths])
        return self.fixed + self.per_token * sum(lengths) + self.per_pair * pairs


SHARED, ALONE = map(Session.recorded, ("shared", "alone"))


@dataclass
class Costs:
    """What runs cost, and how they fail at present.

    Attributes:
        tokens_per_s: of one worker, with texts of 64 tokens; the recorded costs are in proportion.
        slowness: factor of each run.
        error_share: share of the runs that raise.
        hangs: number of runs that will begin and not end.
        is_broken: whether the golden outputs are wrong, so that runs raise too.
    """

    tokens_per_s: float
    slowness: float = 1.0
    error_share: float = 0.0
    hangs: int = 0
    is_broken: bool = False

    def __post_init__(self) -> None:
        self._slower = 64 / SHARED.seconds([64]) / self.tokens_per_s

    def run(self, lengths: Sequence[int], *, alone: bool = False) -> tuple[float, Sequence[float]]:
        """Return the typical time of a run, and the ratios of which it takes one."""
        session = ALONE if alone else SHARED
        return session.seconds(lengths) * self._slower, session.ratios

    def seconds(self, lengths: Sequence[int]) -> float:
        """Return the typical time of a run beside others."""
        return self.run(lengths)[0]


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
    supports_varlen = False

    def __init__(self, server: "Server", bundle: Bundle) -> None:
        self._server, self.version = server, bundle.manifest.version
        self._kernel, self._costs = server.kernel, server.costs
        self._has_lone_session = server.disk.has_lone_session(bundle)
        self._has_run = self._has_probed = False
        self.adapters = adapters.loaded(self._kernel) if server.has_adapters else None

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        """Return the vectors of the encodings after the time of the run."""
        if self.adapters is None:
            return self._run(batch, alone, lambda: [self.version] * len(batch))
        registry = self.adapters
        with registry.using([encoding.adapter for encoding in batch]) as used:
            return self._run(
                batch,
                alone,
                lambda: [self.version + 1000 * adapters.number_of(registry, one) for one in used],
            )

    def _run(
        self, batch: Sequence[Encoding], alone: bool, versions: Callable[[], list[int]]
    ) -> list[HeadOutputs]:
        kernel, costs, random = self._kernel, self._costs, self._kernel.random
        lengths = [len(encoding.input_ids) for encoding in batch]
        seconds, ratios = costs.run(lengths, alone=alone and self._has_lone_session)
        self._hang(seconds, ratios, known=self._has_run)
        self._has_run = True
        kernel.sleep(seconds * costs.slowness * random.choice(ratios))
        if costs.is_broken or random.random() < costs.error_share:
            raise RuntimeError("the device fails")
        ids = [encoding.input_ids for encoding in batch]
        if task_model.ID[POISON] in (whole := np.concatenate(ids)):
            raise RuntimeError("a poisoned encoding")
        may_be_bulk = ids if task_model.ID[BULK] in whole else ()
        bulk = sum(len(one) for one in may_be_bulk if task_model.ID[BULK] in one)
        self._server.ran(sum(lengths), bulk)
        dimensions = self._server.dimensions
        return [
            {"embedding": ArrayResult(_vector(one, version, dimensions))}
            for one, version in zip(ids, versions(), strict=True)
        ]

    def _hang(self, seconds: float, ratios: Sequence[float], *, known: bool) -> None:
        """Never return, if this run is to hang; `known`: whether such a run was measured."""
        costs, server = self._costs, self._server
        if costs.hangs:
            costs.hangs -= 1
            run_s = max(ratios) * costs.slowness * seconds  # as slow as any measured run
            server.hung = self
            server.dead_at = self._kernel.now + 10 * (run_s if known else 6.0) + 8.0
            server.noted("hangs", "engine", seconds)
            self._kernel.park()

    def probe(self) -> None:
        """Run the golden outputs."""
        # After an error, the limit is that of the run.
        seconds, ratios = self._costs.run([_GOLDEN_TOKENS])
        self._hang(seconds, ratios, known=self._has_probed and not self._costs.error_share)
        self._kernel.sleep(seconds)
        if self._costs.is_broken:
            raise RuntimeError("other golden outputs")
        self._has_probed = True


@dataclass
class Server:
    """The server of a world in one process, which starts again when its process has ended.

    Attributes:
        turn_s: processor time of the event loop per callback.
        noted: called with what a process did, its name, and a value.
        failed: called with an error that no code handles.
        has_adapters: whether the model has adapters.
        dimensions: of the vectors.
        keys: the API keys, and whether each has a limit; none: no key is needed.
        downtime_s: seconds until the process starts again.
        listener: the socket to which clients connect.
        process: the process that a signal to the server reaches.
        services: the service and the HTTP server of each process that answers HTTP.
        is_ready: whether the server has begun to accept connections.
        runs: what the engines have run.
        measured_s: when the first run of the present engine ended; infinite before.
        hung: the engine of the last run that hangs.
        dead_at: when its process must have ended: ten times the run, 2 s, and some for the end.
    """

    kernel: Kernel
    costs: Costs
    turn_s: float
    noted: Callable[..., None]
    failed: Callable[[str], None]
    settings: dict[str, Any]
    keys: dict[str, bool]
    has_adapters: bool = False
    dimensions: int = 4
    downtime_s: float = 1.0
    process: Process | None = None
    services: dict[Process, tuple[Service, Any]] = field(default_factory=dict)
    is_ready: bool = False
    is_ending: bool = False
    runs: list[Run] = field(default_factory=list)
    measured_s: float = math.inf
    hung: Engine | None = None
    dead_at: float = math.inf

    def __post_init__(self) -> None:
        shared = Path("/dev/shm")
        self.store = Path(mkdtemp(prefix="world-", dir=shared if shared.is_dir() else None))
        self.disk = Disk(self.kernel, self.store, has_adapters=self.has_adapters)
        self.publish()
        self.write_keys()
        if self.has_adapters:
            adapters.write(self.store / "adapters")
        self.listener = Listener(self.kernel)
        self.keeper = self.kernel.spawn(self._keep)

    def publish(self, *, is_bad: bool = False) -> str:
        """Publish the next version of the model; see `publish`."""
        return publish(self.store / "models", self.dimensions, is_bad=is_bad)

    def write_keys(self) -> None:
        """Write the keys of clients; a limited one may send 60 requests per minute."""
        tables = [
            f'[{name}]\nsha256 = "{sha256(name.encode()).hexdigest()}"\n'
            f'scopes = ["{"metrics" if name == "key-metrics" else "inference"}"]\n'
            f"{'requests_per_minute = 60' if limited else ''}\n"
            for name, limited in self.keys.items()
        ]
        self.keys_file.write_text("\n".join(tables))

    @property
    def keys_file(self) -> Path:
        return self.store / "keys.toml"

    def remove(self) -> None:
        shutil.rmtree(self.store)

    def _keep(self) -> None:
        """Start a process, again and again."""
        while not self.is_ending:
            self.process = process = self.kernel.process("server")
            self.listener, self.measured_s = Listener(self.kernel), math.inf
            self.kernel.spawn(self._serve, process, process=process)
            process.ended.wait()
            self.is_ready = False
            self.noted("ended", "server", process.code)
            self.listener.close()
            if not self.is_ending:
                self.kernel.sleep(self.downtime_s)

    @property
    def all_settings(self) -> Settings:
        store = self.store / "models"
        fixed = {"model_store": store, "host": "10.0.0.1", "allow_anonymous": True, "workers": 2}
        if self.keys:
            fixed["keys_file"] = self.keys_file
        if self.has_adapters:
            fixed["adapter"] = (str(self.store / "adapters"),)
        return Settings(**fixed, **self.settings)  # type: ignore[arg-type]

    def _serve(self, process: Process) -> None:
        """Serve as `serve_in_one_process` does."""
        loop = Loop(self.kernel, process, self.turn_s, self.failed)
        settings = self.all_settings
        try:
            service = single_process(settings, self.make_engine, {"embed": TASKS["embed"]})
        except StartupError:
            self.kernel.exit(2)
        answering = answer_http(
            service,
            settings,
            self.listener,
            before_accepting=lambda: self.started("server"),  # type: ignore[arg-type]
        )
        self.services = {process: (service, process.handlers["server"])}
        loop.run_until_complete(answering)
        self.kernel.exit(0 if service.dead_reason is None else 1)

    def started(self, name: str) -> None:
        """Note that a process is ready."""
        self.is_ready = True
        self.noted("ready", name, None)

    def make_engine(self, bundle: Bundle, *_: object) -> Engine:
        """Open an engine in 0.1 to 0.3 s."""
        self.kernel.sleep(0.1 + 0.2 * self.kernel.random.random())
        if bundle.manifest.license == "bad":
            raise StartupError("the golden outputs differ")
        return Engine(self, bundle)

    @cached_property
    def waits(self) -> WaitLimits:
        settings = self.all_settings
        return WaitLimits.of(settings.max_queue_wait_ms, settings.request_timeout_ms)

    def client(self, address: str) -> str:
        """Return the name of a client in the service."""
        return f"key:key-{address.rpartition('.')[2]}" if self.keys else address

    def terminate(self) -> None:
        """Send SIGTERM to the server."""
        if self.is_ready and self.process is not None and self.process.is_alive:
            self.process.loop.signal(signal.SIGTERM)

    def hang_up(self) -> None:
        """Send SIGHUP to the server."""
        if self.is_ready and self.process is not None and self.process.is_alive:
            self.process.loop.signal(signal.SIGHUP)

    def victim(self) -> Process | None:
        """Return the process that a fault hits."""
        return self.process

    def engine_process(self) -> Process:
        """Return the process whose engines run."""
        assert self.process is not None
        return self.process

    def schedulers(self) -> list[Scheduler]:
        """Return the schedulers of the models that are served now."""
        return [
            model.queue
            for process, (service, _) in self.services.items()
            for model in service.snapshot.by_name.values()
            if process.is_alive and isinstance(model.queue, Scheduler)
        ]

    @property
    def is_dead(self) -> bool:
        """Whether a process ends because its engine is dead; `check_exit` asks for the reason."""
        return any(queue.dead_reason is not None for queue in self.schedulers())

    def serves(self, reference: str) -> bool:
        """Return whether a version is served."""
        return any(reference in one.snapshot.by_name for one, _ in self.services.values())

    def ran(self, tokens: int, bulk: int) -> None:
        """Record a run."""
        waits = any(queue._queue.bulk_tokens > 0 for queue in self.schedulers())
        self.measured_s = min(self.measured_s, self.kernel.now)
        self.runs.append(Run(self.kernel.now, tokens, bulk, waits))
