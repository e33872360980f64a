"""The served models of a process, each with its engine and the queue before it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from model_store import Bundle, Store, StoreError, Task
from service.core import AskedPrecision, BatchReport, Device, Engine, Queue, StartupError, first_line
from service.cost import largest_batch, measure_cost
from service.scheduler import Scheduler
from service.settings import CPU_BATCH_TOKENS, Settings

log = logging.getLogger("cloze")

EngineFactory = Callable[[Bundle, Device, AskedPrecision], Engine]
"""Opens a bundle's engine."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A model, and where its requests wait.

    Attributes:
        precision: of the graph that its engine runs; asked when it is to be told.
    """

    bundle: Bundle
    queue: Queue
    precision: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Told:
    """Who is told what engines do, on any thread.

    Attributes:
        batch: the model's full name, and the run.
        dead: why an engine is.
    """

    batch: Callable[[str, BatchReport], None]
    dead: Callable[[str], None]


MakeLanes = Callable[[Sequence[Bundle], Told], list[Lane]]


def open_bundles(settings: Settings) -> list[Bundle]:
    """Open the bundles that the settings name, or the newest of each name.

    Raises:
        StartupError: there are none, or one does not open.
    """
    store = Store(settings.model_store)
    try:
        names = settings.model or tuple(dict.fromkeys(reference.split("@")[0] for reference in store.references()))
        if not names:
            raise StartupError(
                f"the model store {settings.model_store} has no bundle; make one with `cloze export SOURCE --name NAME`"
            )
        return [store.open(name) for name in names]
    except StoreError as error:
        raise StartupError(str(error)) from error


def local_lanes(
    settings: Settings, make_engine: EngineFactory | None, bundles: Sequence[Bundle], told: Told, *, device_id: int = 0
) -> list[Lane]:
    """Engines and their workers in this process.

    Args:
        settings: see `Settings`.
        make_engine: opens a bundle's engine; None: the real one.
        bundles: to serve.
        told: see `Told`.
        device_id: which GPU.

    Raises:
        StartupError: a bundle does not open, or a device is missing.
    """
    make_engine = make_engine or _onnx_engine(settings, device_id)
    engines = [make_engine(bundle, settings.device, settings.precision) for bundle in bundles]
    lanes = []
    for bundle, engine in zip(bundles, engines, strict=True):
        lanes.append(Lane(bundle, _queue(settings, bundle, engine, told), _precision_of(engine)))
        tasks = ", ".join(bundle.manifest.tasks)
        log.info(
            "serving %s for %s on %s in %s, %s", bundle.manifest.reference, tasks, engine.device, engine.precision, engine.reason
        )
    return lanes


def _precision_of(engine: Engine) -> Callable[[], str]:
    return lambda: engine.precision


def _onnx_engine(settings: Settings, device_id: int) -> EngineFactory:
    try:
        from service.engine import OnnxEngine  # front ends never come here, and are the leaner for it
    except ModuleNotFoundError as error:
        raise StartupError(f"{error.name} is not installed; install cloze[cpu] or, for CUDA, cloze[gpu]") from error
    limit = settings.gpu_memory_limit_mb * 2**20
    return partial(OnnxEngine, device_id=device_id, gpu_memory_limit=limit, threads=settings.intra_op_threads)


def _queue(settings: Settings, bundle: Bundle, engine: Engine, told: Told) -> Scheduler:
    reference = bundle.manifest.reference

    def on_dead(reason: str) -> None:
        log.error("the engine of %s is dead: %s", reference, reason)
        told.dead(reason)

    return Scheduler(
        engine,
        workers=settings.worker_count(engine.device),
        max_batch_tokens=batch_tokens(bundle, engine, settings),
        max_queue_tokens=settings.max_queue_tokens,
        stall_timeout_s=settings.stall_timeout_ms / 1000,
        on_batch=partial(told.batch, reference),
        on_dead=on_dead,
    )


def batch_tokens(bundle: Bundle, engine: Engine, settings: Settings) -> int:
    """How many tokens a batch holds: what the settings say, or what suits the engine; one that mixes lengths has run the largest.

    Raises:
        StartupError: it does not run that.
    """
    asked = settings.max_batch_tokens
    if not engine.mixes_lengths:
        return asked or CPU_BATCH_TOKENS
    manifest = bundle.manifest
    longest, embed, masks = manifest.limits.max_tokens, manifest.embedding is not None, Task.FILL_MASK in manifest.tasks
    if asked:
        try:
            engine.run(largest_batch(longest, asked, embed=embed, masks=masks))
        except Exception as error:  # the runtime's errors have no common type
            raise StartupError(
                f"bundle {manifest.reference} does not run the largest batch of the {asked} tokens that max_batch_tokens "
                f"asks for: {first_line(error)}"
            ) from error
        return asked
    try:
        cost = measure_cost(engine, longest, embed=embed, masks=masks)
    except Exception as error:
        raise StartupError(f"bundle {manifest.reference} does not run even a small batch: {first_line(error)}") from error
    tokens = cost.batch_tokens(settings.batch_latency_ms / 1000)
    log.info("batches of %s hold %d tokens: %s", manifest.reference, tokens, cost)
    return tokens
