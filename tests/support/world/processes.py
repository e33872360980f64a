"""Several processes in one world: the system calls by which they start, end and reach each other.

The supervisor, the front ends and the engine processes are the real code, each on an event loop of
its own. A file descriptor is a number in `System`.
"""

import math
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn.server
from pydantic import TypeAdapter

from cloze.service import service as service_module
from cloze.service.batching.scheduler import Scheduler
from cloze.service.errors import StartupError
from cloze.service.observe.metrics import Metrics
from cloze.service.processes import children, engine_process, frontend, supervisor
from cloze.service.server import process as server_process
from cloze.service.tasks import TASKS
from tests.support.world.kernel import Kernel, Process
from tests.support.world.network import Listener, Loop, Pipe
from tests.support.world.server import Server

_CONFIG = TypeAdapter(children.ChildConfig)


class Ordered(dict[Any, None]):
    """A set that keeps its order, in place of uvicorn's sets of connections and tasks."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class Signals:
    """Stands for the module `signal`: handlers belong to the current process."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def signal(self, number: int, handler: Any) -> Any:
        handlers = self._kernel.current.process.handlers
        before, handlers[number] = handlers.get(number), handler
        return before

    def raise_signal(self, number: int) -> None:
        """The second signal of uvicorn, which the service ignores."""

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)


class System:
    """Stands for the modules `os`, `subprocess` and `socket`.

    Attributes:
        descriptors: listening sockets and pipes by number.
    """

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, kernel: Kernel, start: Callable[[Process, Any], None]) -> None:
        self._kernel, self._start = kernel, start
        self.descriptors: dict[int, Any] = {}

    def descriptor(self, of: Any) -> int:
        self.descriptors[len(self.descriptors) + 100] = of
        return len(self.descriptors) + 99

    def pipe(self) -> tuple[int, int]:
        pipe = Pipe()
        return self.descriptor(pipe), self.descriptor(pipe)

    def fdopen(self, number: int, *_: Any) -> Any:
        return self.descriptors[number]

    def write(self, number: int, data: bytes) -> None:
        self.descriptors[number].write(data)

    def close(self, _: int) -> None:
        """Close a descriptor of this process; a pipe ends with the child."""

    def set_blocking(self, *_: Any) -> None:
        """See `os.set_blocking`."""

    def getppid(self) -> int:
        return os.getpid()

    def _exit(self, code: int) -> None:
        self._kernel.exit(code)

    def socket(self, *, fileno: int) -> Any:
        return self.descriptors[fileno]

    def Popen(self, command: Sequence[str], **_: Any) -> "ChildProcess":  # noqa: N802
        config = _CONFIG.validate_json(command[-1])
        process = self._kernel.process(config.name)
        process.at_end["reports"] = self.descriptors[config.ready].end
        self._kernel.spawn(self._start, process, config, process=process)
        return ChildProcess(self._kernel, process)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class ChildProcess:
    """A simulated process, with the interface of `subprocess.Popen`."""

    def __init__(self, kernel: Kernel, process: Process) -> None:
        self._kernel, self._process = kernel, process

    def terminate(self) -> None:
        if self._process.is_alive and self._process.loop is not None:
            self._process.loop.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._kernel.kill(self._process)

    def wait(self, timeout: float | None = None) -> int:
        if not self._process.ended.wait(timeout):
            raise subprocess.TimeoutExpired("child", timeout or 0.0)
        return self._process.code


class SharedListener(Listener):
    """The descriptor of a listening socket in a child: it is closed there alone."""

    def __init__(self, listener: Listener) -> None:
        self.__dict__ = listener.__dict__

    def close(self) -> None:
        """Leave the socket open for the other processes."""


class Supervised(Server):
    """A server of one engine process and two front ends.

    Attributes:
        children: the processes by name.
        engines: the engine process and its queues.
    """

    def __post_init__(self) -> None:
        self.children: dict[str, Process] = {}
        self.engines: dict[Process, list[Scheduler]] = {}
        super().__post_init__()
        self.settings = {**self.settings, "frontends": 2}

    def _serve(self, process: Process) -> None:
        """Run a supervisor as `supervise` does."""
        kernel = self.kernel
        loop = Loop(kernel, process, 0.0, self.failed)
        system = System(kernel, self._run_child)
        listener = self.listener
        listener.number = system.descriptor(SharedListener(listener))

        def listen_for_front_ends(path: Path) -> Listener:
            made = kernel.named[str(path)] = Listener(kernel)
            made.number = system.descriptor(SharedListener(made))
            return made

        replace = kernel.replace
        for module in (children, engine_process):
            replace(module, "os", system)
        replace(children, "subprocess", system)
        replace(engine_process, "socket", system)
        replace(frontend, "socket", system)
        replace(supervisor, "listen_for_front_ends", listen_for_front_ends)
        try:
            main = supervisor.Supervisor(self.all_settings, listener, self.store)  # type: ignore[arg-type]
        except StartupError:
            kernel.exit(2)
        process.at_end["children"] = self._kill_children
        kernel.exit(loop.run_until_complete(main.run()))

    def _kill_children(self) -> None:
        """Kill what would outlive the supervisor; see `machine.end_with_parent`."""
        for child in self.children.values():
            self.kernel.kill(child)

    def _run_child(self, process: Process, config: Any) -> None:
        """Be a child; see `children.run_child`."""
        name = config.name
        self.children[name] = process
        process.at_end["note"] = lambda: self.noted("ended", name, process.code)
        loop = Loop(self.kernel, process, self.turn_s, self.failed)
        try:
            if name.startswith("engine"):
                loop.run_until_complete(engine_process.run_engines(config, self.make_engine))
            else:
                loop.run_until_complete(frontend.run_front_end(config))
        except StartupError:
            self.kernel.exit(2)
        self.kernel.exit(0)

    def started(self, name: str) -> None:
        super().started(name)
        self.noted("ready", "server", None)

    def victim(self) -> Process | None:
        alive = [child for child in self.children.values() if child.is_alive]
        return self.kernel.random.choice(alive) if alive else None

    def engine_process(self) -> Process:
        return self.children["engine-0"]

    def schedulers(self) -> list[Scheduler]:
        return [q for process, queues in self.engines.items() for q in queues if process.is_alive]


@contextmanager
def processes_installed(kernel: Kernel, server: Callable[[], Server]) -> Iterator[None]:
    """Let the service use simulated signals and processes, and note what it makes."""
    replace = kernel.replace
    signals = Signals(kernel)
    replace(server_process, "signal", signals)
    replace(uvicorn.server, "signal", signals)
    replace(server_process, "_make_collections_rare", lambda: None)

    class State(uvicorn.server.ServerState):
        def __init__(self) -> None:
            super().__init__()
            self.connections, self.tasks = Ordered(), Ordered()  # type: ignore[assignment]

    class Http(server_process._Server):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            kernel.current.process.handlers["server"] = self  # type: ignore[index, assignment]

    class FrontEndService(service_module.Service):
        def __init__(self, settings: Any, metrics: Any, models: Any, **options: Any) -> None:
            tasks = {"embed": TASKS["embed"]}
            super().__init__(settings, metrics, models, tasks, **options)

    class EngineServer(engine_process.EngineServer):
        def __init__(self, models: Any) -> None:
            super().__init__(models)
            supervised = server()
            assert isinstance(supervised, Supervised)
            supervised.engines = {kernel.current.process: self.queues}  # type: ignore[dict-item]
            supervised.measured_s = math.inf
            supervised.noted("ready", kernel.current.process.name, None)

    def answer(service: Any, settings: Any, listener: Any, before_accepting: Any) -> Any:
        process = kernel.current.process

        def accepting() -> None:
            before_accepting()
            server().started(process.name)

        answering = server_process.answer_http(
            service, settings, listener, before_accepting=accepting
        )
        server().services[process] = service, process.handlers["server"]
        return answering

    replace(uvicorn.server, "ServerState", State)
    replace(server_process, "_Server", Http)
    replace(frontend, "Service", FrontEndService)
    replace(frontend, "answer_http", answer)
    replace(engine_process, "EngineServer", EngineServer)
    replace(engine_process, "_exit_dead", lambda: kernel.exit(1))
    for module in (frontend, engine_process):
        replace(module, "Metrics", lambda models=(), **_: Metrics(models))
    restarts = SimpleNamespace(inc=lambda: None)
    replace(supervisor, "count_restarts", lambda _, kinds: dict.fromkeys(kinds, restarts))
    replace(supervisor, "listen", lambda *_: None)
    replace(children, "forget_process", lambda *_: None)
    yield
