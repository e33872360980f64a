"""What a process does first: signals, the log, and engines, without what HTTP needs.

`cloze serve` imports HTTP and the protocols on a thread while the engines open, two side by side:
onnxruntime releases Python's lock.
"""

import asyncio
import atexit
import errno
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, TypeVar

from cloze.model_store import Bundle
from cloze.model_store.error_lines import first_line
from cloze.service.core import Device, Engine, RequestedPrecision
from cloze.service.models.adapters import AdapterBundle
from cloze.service.models.served_models import EngineFactory, check_memory
from cloze.service.observe.logs import start_logging
from cloze.service.settings import Settings, unknown_variables

T = TypeVar("T")

log = logging.getLogger("cloze")

_SIGNS_OF_LITTLE_MEMORY = ("std::bad_alloc", "can't start new thread", "MemoryError")
"""Parts of errors of onnxruntime and of Python, which have no type of their own."""


def begin(settings: Settings) -> None:
    """Set up signals and logging. Every process of a server calls this function first."""
    # Linux does not deliver a signal without a handler to process 1 of a container.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exit_on_signal)
    if hasattr(signal, "SIGHUP"):  # not on Windows
        # SIGHUP asks for a reload; a process that cannot reload must not end by it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    start_logging(settings.log_level, settings.log_format)


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop; without uvloop (Windows), on asyncio's own loop of selectors.

    The other loop of Windows has no readers of sockets, which accept connections.
    """
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop
    with suppress(ModuleNotFoundError):
        import uvloop

        new_loop = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


def warn_of_unknown_variables() -> None:
    """Log a warning for each ``CLOZE_`` environment variable that is not a setting."""
    for name in unknown_variables():
        log.warning("the variable %s is not a setting; see `cloze serve --help`", name)


def memory_problem(error: Exception) -> str | None:
    """Return a line that says what to do if a start lacked memory or threads; None if not."""
    reason = first_line(error)
    is_short = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    if not (is_short or any(sign in reason for sign in _SIGNS_OF_LITTLE_MEMORY)):
        return None
    return (
        f"there is not enough memory to start ({reason}); raise the limit of memory (ulimit -v, "
        "or the container's) or of processes (ulimit -u), or serve fewer models by --model"
    )


def exit_on_signal(number: int, _: FrameType | None) -> NoReturn:
    """End the process during the start, and delete its temporary folders.

    SystemExit would not do: Python ignores exceptions of weak references' callbacks, and turns
    those of `__set_name__` into a RuntimeError.
    """
    atexit._run_exitfuncs()
    os._exit(128 + number)


def open_early(settings: Settings, bundles: Sequence[Bundle], make: EngineFactory) -> EngineFactory:
    """Open the engines of bundles; return a factory that returns each of them once, then new ones.

    Two engines open side by side, one of them on this thread. More would need more memory: opening
    an engine may take three times that of its weights, and what other threads freed stays resident.

    Raises:
        StartupError: an engine does not open, or the memory cannot suffice.
    """
    check_memory(bundles, settings)
    bases = [bundle for bundle in bundles if not isinstance(bundle, AdapterBundle)]

    def engines(some: Sequence[Bundle]) -> dict[str, Engine]:
        device, precision = settings.device, settings.precision
        return {one.manifest.reference: make(one, device, precision) for one in some}

    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(engines, bases[1::2])
        opened = engines(bases[::2]) | others.result()

    def engine(bundle: Bundle, device: Device, precision: RequestedPrecision) -> Engine:
        early = opened.pop(bundle.manifest.reference, None)
        return make(bundle, device, precision) if early is None else early

    return engine
