"""The served models of a process: each bundle with the queue of its engine."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from cloze.model_store import Bundle, Store, StoreError
from cloze.model_store.error_lines import first_line
from cloze.model_store.installation import install_command
from cloze.model_store.locations import SHIPPED_NAMES
from cloze.service.batching.admission import Activity, SchedulerLimits, WaitLimits
from cloze.service.batching.cost import largest_batch, measure_cost
from cloze.service.batching.fair_queue import Queue
from cloze.service.batching.scheduler import Scheduler
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import AdapterRegistry, BatchReport, Device, Engine, RequestedPrecision
from cloze.service.engine.graph_choice import least_weight_bytes
from cloze.service.errors import StartupError
from cloze.service.machine import available_cpus, memory_limit
from cloze.service.models.adapters import AdapterBundle, AdapterQueue, Opened, open_adapters
from cloze.service.settings import CPU_BATCH_TOKENS, Settings

log = logging.getLogger("cloze")

EngineFactory = Callable[[Bundle, Device, RequestedPrecision], Engine]
"""Opens the engine of a bundle on a device, in a precision."""

_SHOWN_ADAPTERS = 20
"""Most adapters of a base that the log names."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A bundle and the queue of its engine.

    `precision` returns the precision of the engine's graph, or "" while no engine runs.
    `adapters` has the adapters of the engine; None: the engine takes none. `labels` is the encoder
    of labels of a bi-encoder, which answers no request itself.
    """

    bundle: Bundle
    queue: Queue
    precision: Callable[[], str]
    adapters: AdapterRegistry | None = None
    labels: "ServedModel | None" = None

    @property
    def queues(self) -> list[Queue]:
        """The queue, and that of the encoder of labels."""
        return [self.queue] if self.labels is None else [self.queue, self.labels.queue]


def close_models(models: Iterable[ServedModel], clock: Clock = CLOCK) -> None:
    """Fail the pending requests of models, and end the threads of their engines.

    Threads that still run after 5 s are abandoned.
    """
    deadline = clock.monotonic() + 5.0
    for queue in [queue for model in models for queue in model.queues]:
        queue.close(max(0.0, deadline - clock.monotonic()))


def open_bundles(settings: Settings, running: Iterable[Bundle] = ()) -> Opened[Bundle]:
    """Open the bundles that the settings name, or the newest version of each name.

    A bundle that several names stand for is opened once. Adapters follow the bundles, so no
    adapter is the default of a task that a bundle serves. The log has the adapters that are left
    out; see `open_adapters`.

    Raises:
        StartupError: the store has no bundle, or a bundle or an adapter does not open.
    """
    store = Store(settings.model_store)
    try:
        names = settings.model or in_default_order(store)
        if not names:
            raise StartupError(
                f"the model store {settings.model_store} has no bundle; "
                "make one with `cloze export SOURCE --name NAME`"
            )
        with ThreadPoolExecutor(2) as pool:  # hashing releases Python's lock
            opened = [*pool.map(store.open, names)]
        # NAME and NAME@VERSION may be one bundle, which has one engine.
        bundles = [*{bundle.path: bundle for bundle in opened}.values()]
    except StoreError as error:
        raise StartupError(str(error)) from error
    adapters = open_adapters(settings.adapter, bundles, settings.adapter_memory_mb, running)
    for reason in adapters.refused.values():
        log.error("an adapter is left out: %s", reason)
    return Opened([*bundles, *adapters.bundles], adapters.refused)


def kept_reasons(settings: Settings) -> dict[str, str]:
    """Return why a reload keeps a model, by its full name, if the store has a newer version.

    A directory, a repository or an address stands for the version that it had at the start.
    """
    store, reasons = Store(settings.model_store), {}
    for reference in settings.model:
        name, _, version = reference.partition("@")
        with suppress(StoreError):  # a folder that may be entered, but not listed
            if version and int(version) < (newest := int(store.resolve(name).name)):
                reasons[reference] = (
                    f"--model stands for this version since the start, and {name}@{newest} is "
                    f"newer: start the server again, with --model {name} to follow new versions"
                )
    return reasons


def in_default_order(store: Store) -> tuple[str, ...]:
    """Return the names of all bundles: those of the package, then others, the oldest first.

    A name is as old as its lowest version, so a new version changes no default.
    """
    oldest: dict[str, str] = {}
    for reference in store.references():
        oldest.setdefault(reference.split("@")[0], reference)
    shipped = [name for name in SHIPPED_NAMES if name in oldest]
    ages = [(store.manifest(oldest[name]).created, name) for name in oldest.keys() - SHIPPED_NAMES]
    return *shipped, *(name for _, name in sorted(ages))


class LocalModels:
    """Opens engines in this process, and starts their schedulers.

    Any thread may call the callbacks.

    Args:
        make_engine: None selects `OnnxEngine`.
        on_batch: called after each batch, with the model's full name and the report.
        on_dead: called once per dead engine with the reason.

    Raises:
        StartupError: the device is missing, or the settings do not fit it.
    """

    def __init__(
        self,
        settings: Settings,
        make_engine: EngineFactory | None = None,
        *,
        on_batch: Callable[[str, BatchReport], None] = lambda _, __: None,
        on_dead: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings, self._on_batch, self._on_dead = settings, on_batch, on_dead
        self._make_engine = make_engine or onnx_engine(settings)
        self._activity = Activity()

    def open(
        self, bundles: Sequence[Bundle], running: Sequence[ServedModel] = ()
    ) -> list[ServedModel]:
        """Return the served models, in the order of their bundles.

        Args:
            bundles: what to serve.
            running: models that are served already; those of these bundles are returned again.

        Raises:
            StartupError: an engine does not open, or the memory cannot suffice.
        """
        check_memory(bundles, self._settings)
        served = {model.bundle.manifest.reference: model for model in running}
        models: dict[str, ServedModel] = {}
        new: dict[str, ServedModel] = {}
        try:
            for bundle in bundles:
                reference = bundle.manifest.reference
                model = served.get(reference)
                if model is not None and model.bundle.manifest != bundle.manifest:
                    model = None  # the digest of a file differs
                if isinstance(bundle, AdapterBundle):
                    base = bundle.base.manifest.reference
                    # One that is kept may be in another folder now, and is read again from there.
                    adapters = models[base].adapters
                    assert adapters is not None
                    adapters.add(bundle.key, bundle.read)
                    if model is None or base in new:
                        queue = AdapterQueue(models[base].queue, bundle.key, adapters)
                        model = new[reference] = ServedModel(bundle, queue, models[base].precision)
                elif model is None:
                    model = new[reference] = self._open(bundle, ", ".join(bundle.manifest.tasks))
                    if bundle.label_encoder is not None:
                        labels = self._open(bundle.label_encoder, "the labels of entities")
                        model = new[reference] = replace(model, labels=labels)
                models[reference] = model
        except BaseException:
            close_models(new.values())
            raise
        _log_adapters(model.bundle for model in new.values())
        return [models[bundle.manifest.reference] for bundle in bundles]

    def _open(self, bundle: Bundle, use: str) -> ServedModel:
        settings, reference = self._settings, bundle.manifest.reference
        engine = self._make_engine(bundle, settings.device, settings.precision)

        def on_dead(reason: str) -> None:
            log.error("the engine of %s is dead: %s", reference, reason)
            self._on_dead(reason)

        is_timed = not settings.max_batch_tokens and not engine.supports_varlen
        limits = SchedulerLimits(
            workers=settings.worker_count(engine.device),
            max_batch_tokens=batch_tokens(bundle, engine, settings),
            max_queue_tokens=settings.max_queue_tokens,
            waits=WaitLimits.of(settings.max_queue_wait_ms, settings.request_timeout_ms),
            stall_timeout_s=settings.stall_timeout_ms / 1000,
            canary_s=settings.canary_interval_ms / 1000,
            batch_latency_s=settings.batch_latency_ms / 1000 if is_timed else 0.0,
        )
        on_batch = partial(self._on_batch, reference)
        queue = Scheduler(
            engine, limits, activity=self._activity, on_batch=on_batch, on_dead=on_dead
        )
        queue.start()
        log.info(
            "serving %s for %s on %s in %s, %s",
            reference,
            use,
            engine.device,
            engine.precision,
            engine.reason,
        )
        return ServedModel(bundle, queue, lambda: engine.precision, engine.adapters)


def _log_adapters(bundles: Iterable[Bundle]) -> None:
    """Log the adapters of each base."""
    of_base: dict[str, list[str]] = {}
    for bundle in bundles:
        if isinstance(bundle, AdapterBundle):
            names = of_base.setdefault(bundle.base.manifest.reference, [])
            names.append(bundle.manifest.reference)
    for base, names in of_base.items():
        more = f" and {len(names) - _SHOWN_ADAPTERS} more" if len(names) > _SHOWN_ADAPTERS else ""
        log.info("serving %s%s on %s", ", ".join(names[:_SHOWN_ADAPTERS]), more, base)


def check_memory(bundles: Iterable[Bundle], settings: Settings) -> None:
    """Check that the weights of bundles, and their adapters, fit into the memory.

    Without the check, the kernel kills the process while it opens a model, and nothing says why.
    The weights of the graphs that run are a lower bound of the memory, so nothing is refused that
    might run.

    Raises:
        StartupError: the process with its weights needs more.
    """
    if (limit := memory_limit()) is None:
        return
    sizes: dict[str, int] = {}
    for bundle in bundles:
        if isinstance(bundle, AdapterBundle):
            name = f"the adapters of {bundle.base.manifest.reference}"
            most = settings.adapter_memory_mb * 2**20
            sizes[name] = min(most, sizes.get(name, 0) + bundle.size)
        else:
            encoders = filter(None, (bundle, bundle.label_encoder))
            sizes[bundle.manifest.reference] = sum(
                least_weight_bytes(one, settings.device, settings.precision) for one in encoders
            )
    needed = 70_000_000 + sum(sizes.values())  # a server without models has 84 MB
    if needed > limit:
        shown = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items())
        lower = ", or lower CLOZE_ADAPTER_MEMORY_MB" if settings.adapter else ""
        raise StartupError(
            f"the memory limit of this process is {limit / 1e6:.0f} MB, and the models need at "
            f"least {needed / 1e6:.0f} MB ({shown}); raise it, or serve fewer models{lower}"
        )


def onnx_engine(settings: Settings, device_id: int = 0) -> EngineFactory:
    """Return the factory of the engines that a server with these settings runs.

    Raises:
        StartupError: onnxruntime is not installed, or the settings ask for more threads than cores.
    """
    try:
        # Front ends import this module too, and use less memory without onnxruntime.
        from cloze.service.engine.onnx_engine import OnnxEngine, SessionOptions
    except ModuleNotFoundError as error:
        raise StartupError(
            f"{error.name} is not installed; install it with: {install_command('cpu')} "
            "(or gpu instead of cpu, for CUDA)"
        ) from error
    cores = available_cpus()
    if settings.intra_op_threads > cores:
        raise StartupError(
            f"intra_op_threads is {settings.intra_op_threads}, but this process may use {cores} "
            f"core{'s' * (cores > 1)}"
        )
    options = SessionOptions(
        device_id,
        settings.gpu_memory_limit_mb * 2**20,
        settings.intra_op_threads,
        min(cores, 8),  # more were not measured, and they spin while they wait
        settings.adapter_memory_mb * 2**20 if settings.adapter else 0,
    )
    return partial(OnnxEngine, options=options)


def batch_tokens(bundle: Bundle, engine: Engine, settings: Settings) -> int:
    """Return the batch size limit in tokens: the setting's value, or a value fitted to the engine.

    An engine that supports variable-length batches runs the largest batch of that size in this
    function, so that a lack of memory stops the start.

    Raises:
        StartupError: the engine does not run that batch.
    """
    requested, manifest = settings.max_batch_tokens, bundle.manifest
    if not engine.supports_varlen:
        return requested or CPU_BATCH_TOKENS
    heads, longest = manifest.graph_heads, manifest.limits.max_tokens
    batch = "even a small batch"
    try:
        if requested:
            batch = f"the largest batch of the {requested} tokens that max_batch_tokens asks for"
            engine.run(largest_batch(heads, longest, requested))
            return requested
        cost = measure_cost(engine, heads, longest)
    except Exception as error:  # the runtime's errors have no common type
        raise StartupError(
            f"bundle {manifest.reference} does not run {batch}: {first_line(error)}"
        ) from error
    tokens = cost.batch_tokens(settings.batch_latency_ms / 1000)
    log.info("batches of %s hold %d tokens: %s", manifest.reference, tokens, cost)
    return tokens
