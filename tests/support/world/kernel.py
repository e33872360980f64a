"""Simulated time, threads and processes: one real thread runs all of them, in an order of the seed.

A simulated thread is a greenlet. It runs until it waits, for a lock, a condition, an event or a
time. Then the kernel chooses by the seed which of the ready threads runs next. If none is ready,
the clock leaps to the next timer.

For example, two workers wait for a batch, and a request comes. The event loop notifies the
condition of the first worker and goes on until it waits itself. Then either the worker or another
ready thread runs. The engine of the worker sleeps for 0.2 s, so the clock leaps there if nothing
comes before.
"""

import asyncio
import gc
import heapq
import itertools
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from anyio._backends import _asyncio
from greenlet import GreenletExit, greenlet

from cloze.service import clock, service, threads
from cloze.service.batching import scheduler
from cloze.service.models import served_models
from cloze.service.observe import logs
from cloze.service.server import process as server_process

START_S = 1000.0
"""The monotonic clock at the start of a history."""

_PREEMPTED = 0.2
"""Share of the locks at which a worker lets other threads go first."""


class Process:
    """A simulated process: its threads end with it, and do not run while it is stopped."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive, self.stops = True, 0  # how often it is stopped now
        self.ended, self.code = Event(), -9
        self.at_end: dict[Any, Callable[[], None]] = {}  # what the system does when it has ended
        self.handlers: dict[int, Callable[..., None]] = {}  # of signals
        self.held: list[Thread] = []  # threads that would run, but the process is stopped
        self.threads: dict[Thread, None] = {}
        self.loop: Any = None


class Thread:
    """A simulated thread, with the interface of `threading.Thread`."""

    kernel: "Kernel"

    def __init__(
        self,
        target: Callable[..., Any],
        name: str = "",
        daemon: bool = True,
        args: tuple[Any, ...] = (),
        process: Process | None = None,
    ) -> None:
        self.name, self._target, self._args = name, target, args
        self.process = process or self.kernel.current.process
        self.greenlet: Any = None
        self.is_parked = self.was_woken = False
        self.ticket = 0  # of the timer that may wake it
        self._ended = Event()

    def start(self) -> None:
        self.greenlet = greenlet(self._run, self.kernel.hub)
        self.process.threads[self] = None
        self.kernel.ready.append(self)

    def _run(self) -> None:
        try:
            self._target(*self._args)
        except Exception as error:
            if not self.kernel.is_reaping:
                self.kernel.on_error(f"a thread of {self.process.name} ended with {error!r}")
        finally:
            self.process.threads.pop(self, None)
            self._ended.set()

    @property
    def is_worker(self) -> bool:
        """Whether it may be preempted: an event loop goes on until it waits."""
        loop = self.process.loop
        return loop is not None and loop.thread is not self and not self.kernel.is_reaping

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


class Kernel:
    """The clock and the scheduler of simulated threads.

    Attributes:
        now: seconds of the monotonic clock of all processes.
        wall_s: what the wall clock shows beyond the monotonic clock.
        current: the thread that runs.
        switches: number of times that a thread has begun to run.
        has_ended: whether the history has ended.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.wall_s = START_S, 1.7e9
        self.hub = greenlet.getcurrent()
        self.ready: list[Thread] = []
        self.switches = 0
        self.has_ended = False
        self.on_error: Callable[[str], None] = print
        self.is_reaping = False
        self.processes: list[Process] = []
        self.replaced = pytest.MonkeyPatch()
        self.named: dict[str, Any] = {}  # listening sockets by path
        self._timers: list[tuple[float, int, Thread | None, Any]] = []
        self._serials = itertools.count()
        Thread.kernel = Lock.kernel = Event.kernel = self
        self.outside = self.current = Thread(lambda: None, "outside", process=self.process("world"))

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Let an attribute of a module or an object be another one until the world ends."""
        self.replaced.setattr(owner, name, value, raising=False)

    def process(self, name: str) -> Process:
        self.processes.append(Process(name))
        return self.processes[-1]

    def spawn(
        self, target: Callable[..., Any], *args: Any, process: Process | None = None
    ) -> Thread:
        """Start a thread, by default of the current process."""
        thread = Thread(target, args=args, process=process)
        thread.start()
        return thread

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Call a function at a time; it may not wait."""
        heapq.heappush(self._timers, (when, next(self._serials), None, function))

    def sleep(self, seconds: float) -> None:
        self.park(max(0.0, seconds))

    def park(self, seconds: float | None = None) -> bool:
        """Wait until another thread wakes this one, or for some seconds; return whether it did."""
        thread = self.current
        thread.ticket += 1
        thread.is_parked, thread.was_woken = True, False
        if seconds is not None:
            item = (self.now + seconds, next(self._serials), thread, thread.ticket)
            heapq.heappush(self._timers, item)
        self._switch()
        return thread.was_woken

    def wake(self, thread: Thread) -> None:
        if thread.is_parked:
            thread.is_parked, thread.was_woken = False, True
            self.ready.append(thread)

    def let_others_run(self) -> None:
        """Let the seed choose again which thread runs."""
        if self.ready:
            self.ready.append(self.current)
            self._switch()

    def _switch(self) -> None:
        """Let the next thread run; only the hub begins threads, so that stacks are short."""
        if (loop := asyncio._get_running_loop()) is not None:
            asyncio._set_running_loop(None)
        thread = self._next()
        if thread is None or not thread.greenlet:
            self.hub.switch(thread)
        elif thread is not self.current:
            self.current = thread
            thread.greenlet.switch()
        if loop is not None:
            asyncio._set_running_loop(loop)

    def _next(self) -> Thread | None:
        """Return the thread that runs next, after what happens before; None at the end."""
        ready, timers, choose = self.ready, self._timers, self.random.random
        while not self.has_ended and self.switches < 5_000_000:
            if ready:
                thread = ready.pop(int(choose() * len(ready))) if len(ready) > 1 else ready.pop()
            elif timers:
                when, _, waiting, what = heapq.heappop(timers)
                self.now = max(self.now, when)
                if waiting is None:
                    what()
                    continue
                if not waiting.is_parked or waiting.ticket != what:
                    continue
                thread = waiting
                thread.is_parked = False
            else:
                return None
            if thread.process.stops:
                thread.process.held.append(thread)
            elif thread.process.is_alive:
                self.switches += 1
                return thread
        return None

    def run(self) -> None:
        """Run threads until the history has ended, or until nothing is left to happen."""
        thread = self._next()
        while thread is not None:
            self.current = thread
            thread = thread.greenlet.switch() or self._next()
        self.current = self.outside

    def stop(self, process: Process) -> None:
        process.stops += 1

    def go_on(self, process: Process) -> None:
        process.stops -= 1
        if not process.stops:
            self.ready.extend(process.held)
            process.held.clear()

    def kill(self, process: Process) -> None:
        """End a process: nothing of it runs again."""
        if process.is_alive:
            process.is_alive = False
            for end in [*process.at_end.values()]:
                end()
            process.ended.set()

    def exit(self, code: int) -> None:
        """End the process of the current thread, which never goes on."""
        process = self.current.process
        process.code = code
        self.kill(process)
        self.park()

    def close(self) -> None:
        """Unwind the threads that are left; nothing that they do has an effect."""
        self.is_reaping = self.has_ended = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that never began
            for process in self.processes:
                process.is_alive = False
                for thread in [*process.threads]:
                    self.current = thread
                    with suppress(Exception):
                        thread.greenlet.throw(GreenletExit)
                if process.loop is not None:
                    process.loop.discard()
        self.current = self.outside
        # Else these would keep all that a loop refers to.
        _asyncio._task_states.clear()
        sys.set_asyncgen_hooks(None, None)


class Lock:
    """A lock of simulated threads, which its owner may take again as if it were an RLock."""

    kernel: Kernel

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = self.kernel
        thread = kernel.current
        if self._owner is not thread:
            if kernel.ready and thread.is_worker and kernel.random.random() < _PREEMPTED:
                kernel.let_others_run()
            while self._owner is not None and not kernel.is_reaping:
                kernel.sleep(1e-6)
            self._owner = thread
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count <= 0:
            self._owner, self._count = None, 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """A condition of simulated threads; it wakes them in the order in which they began to wait."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock()
        self._waiting: deque[Thread] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        kernel = self._lock.kernel
        thread = kernel.current
        self._waiting.append(thread)
        count, self._lock._count, self._lock._owner = self._lock._count, 0, None
        try:
            woken = kernel.park(timeout)
        finally:
            if thread in self._waiting:
                self._waiting.remove(thread)
            self._lock.acquire()
            self._lock._count = count
        return woken

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            self.wait()

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._lock.kernel.wake(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """An event of simulated threads."""

    kernel: Kernel

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            self.kernel.wake(thread)
        self._waiting.clear()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            thread = self.kernel.current
            self._waiting.append(thread)
            self.kernel.park(timeout)
            if thread in self._waiting:
                self._waiting.remove(thread)
        return self._is_set


class Threading:
    """Stands for the module `threading` in the modules of the service."""

    Thread, Lock, RLock, Condition, Event = Thread, Lock, Lock, Condition, Event

    @staticmethod
    def Timer(seconds: float, function: Callable[[], None]) -> Thread:  # noqa: N802
        kernel = Lock.kernel
        return Thread(lambda: (kernel.sleep(seconds), function()))

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class LoopThreads:
    """Stands for `anyio.to_thread` and `anyio.from_thread`: functions run on simulated threads."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._abandoned: set[Thread] = set()

    async def run_sync(self, function: Any, *args: Any, abandon_on_cancel: bool = False) -> Any:
        loop = asyncio.get_running_loop()
        async with self.current_default_thread_limiter():
            started: list[Thread] = []

            def on_thread() -> Any:
                started.append(self._kernel.current)
                return function(*args)

            try:
                return await loop.run_in_executor(None, on_thread)
            except asyncio.CancelledError:
                self._abandoned.update(started)
                raise

    @staticmethod
    def current_default_thread_limiter() -> Any:
        import anyio.to_thread

        return anyio.to_thread.current_default_thread_limiter()

    def check_cancelled(self) -> None:
        """Let other threads run, and raise if nobody waits for this one."""
        if self._kernel.current is self._kernel.current.process.loop.thread:
            raise RuntimeError("this is the event loop")
        self._kernel.let_others_run()
        if self._kernel.current in self._abandoned:
            raise asyncio.CancelledError


@contextmanager
def installed(kernel: Kernel) -> Iterator[None]:
    """Let all modules of the service use the clock and the threads of a kernel."""
    replace = kernel.replace
    for name, module in [*sys.modules.items()]:
        is_own = name.startswith("cloze.service") and module is not clock
        if is_own and getattr(module, "threading", None) is threading:
            replace(module, "threading", Threading())
    replace(clock.CLOCK, "monotonic", lambda: kernel.now)
    replace(clock.CLOCK, "wall", lambda: kernel.now + kernel.wall_s)
    replace(clock.CLOCK, "sleep", kernel.sleep)
    replace(clock.CLOCK, "wait", lambda event, seconds: event.wait(seconds))
    loop_threads = LoopThreads(kernel)
    replace(threads, "to_thread", loop_threads)
    replace(threads, "from_thread", loop_threads)
    replace(scheduler, "lower_thread_priority", lambda _: None)
    pool = nullcontext(SimpleNamespace(map=map))
    replace(served_models, "ThreadPoolExecutor", lambda _: pool)
    # Collections take 0.1 s, and have no effect that the world could see.
    replace(service, "_return_memory", lambda: None)
    replace(server_process, "gc", SimpleNamespace(collect=lambda: None))
    was_collecting = gc.isenabled()
    gc.disable()
    state = random.getstate()
    random.seed(kernel.random.random())  # the service draws the ids of requests
    try:
        yield
    finally:
        kernel.close()
        kernel.replaced.undo()
        logs.WRITER.waiting.clear()
        random.setstate(state)
        if was_collecting:
            gc.enable()
