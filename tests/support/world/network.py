"""The event loop of a simulated process, and connections in memory.

A connection has two ends. What one end sends arrives at the other one in order, after a latency.
An end that is not read holds `WINDOW` bytes at most: the sender waits.
"""

import asyncio
import heapq
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from tests.support.world.kernel import Kernel, Process, Thread

_NOBODY: Any = SimpleNamespace(
    unread=0, is_closed=True, inbox=deque(maxlen=0), on_arrival=lambda: None
)
"""The peer of an end when both are closed, so that they do not refer to each other."""

WINDOW = 65_536
"""Bytes that arrive at an end before they are read."""

_BACKLOG = 2048


class Loop(asyncio.BaseEventLoop):
    """The event loop of a process. It waits as a simulated thread.

    Args:
        turn_s: seconds of processor time per callback.
        on_error: called with what no code of the process handles.
    """

    def __init__(
        self, kernel: Kernel, process: Process, turn_s: float, on_error: Callable[[str], None]
    ) -> None:
        super().__init__()
        self.kernel, self.process, self.turn_s = kernel, process, turn_s
        self._selector = self
        process.loop = self
        self.thread = kernel.current
        self.signals: dict[int, tuple[Callable[..., None], Any]] = {}
        self._is_polling = False
        self._on_error = on_error
        self.set_exception_handler(self._unhandled)

    get_debug = staticmethod(bool)  # False, for each callback

    def time(self) -> float:
        return self.kernel.now

    _ready: Any
    _scheduled: Any
    _stopping: bool

    def select(self, timeout: float | None) -> None:
        """Let other threads run, and wait for at most so long."""
        if timeout == 0:
            if self.turn_s:
                self.kernel.park(self.turn_s * len(self._ready))
            else:
                self.kernel.let_others_run()
        else:
            self._is_polling = True
            self.kernel.park(timeout)
            self._is_polling = False

    def _run_once(self) -> None:
        """Run what is ready, as asyncio does, without the part for files and slow callbacks."""
        scheduled, ready, timeout = self._scheduled, self._ready, None
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if ready or self._stopping:
            timeout = 0.0
        elif scheduled:
            timeout = max(0.0, scheduled[0]._when - self.kernel.now)
        self.select(timeout)
        while scheduled and scheduled[0]._when <= self.kernel.now + 1e-9:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            if not (handle := ready.popleft())._cancelled:
                handle._run()

    def _write_to_self(self) -> None:
        if self._is_polling:
            self.kernel.wake(self.thread)

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        if self.kernel.is_reaping:
            raise RuntimeError("the process has ended")
        return super().call_soon_threadsafe(*args, **kwargs)

    def _unhandled(self, _: Any, context: dict[str, Any]) -> None:
        if self.process.is_alive:
            error = context.get("exception")
            self._on_error(f"{context.get('message')}: {error!r} in {self.process.name}")

    def discard(self) -> None:
        """Forget what has not run, at the end of a process."""
        self._thread_id = None
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with suppress(BaseException):
                task.get_coro().close()  # type: ignore[union-attr]
        self._ready.clear()
        self._scheduled.clear()

    def __del__(self) -> None:
        """Do not warn of a loop that a killed process has left open."""

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> Any:
        """Run a function on a thread of its own, which begins within 2 ms."""
        future, kernel = self.create_future(), self.kernel

        def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not future.done():
                set_outcome(outcome)

        def work() -> None:
            kernel.sleep(kernel.random.random() * 0.002)
            try:
                outcome = function(*args)
            except Exception as error:
                self._from_thread(finish, future.set_exception, error)
            except asyncio.CancelledError:  # abandoned
                self._from_thread(finish, lambda _: future.cancel(), None)
            else:
                self._from_thread(finish, future.set_result, outcome)

        kernel.spawn(work, process=self.process)
        return future

    def _from_thread(self, *call: Any) -> None:
        if not self.is_closed():
            self.call_soon_threadsafe(*call)

    def add_signal_handler(self, sig: int, callback: Callable[..., None], *args: Any) -> None:  # type: ignore[override]
        self.signals[sig] = callback, args

    def signal(self, number: int) -> None:
        """Handle a signal that was sent to the process."""
        if number in self.signals:
            callback, args = self.signals[number]
            self.call_soon_threadsafe(callback, *args)
        elif number in self.process.handlers:
            self.call_soon_threadsafe(self.process.handlers[number], number, None)

    def add_reader(self, listener: Any, callback: Callable[[], None]) -> None:  # type: ignore[override]
        listener.readers[self] = callback
        listener.notify()

    def remove_reader(self, listener: Any) -> bool:  # type: ignore[override]
        return listener.readers.pop(self, None) is not None

    async def connect_accepted_socket(self, factory: Any, sock: "End", **_: Any) -> Any:  # type: ignore[override]
        transport = Transport(self, sock, factory())
        return transport, transport.protocol

    async def create_unix_connection(self, factory: Any, path: str) -> Any:  # type: ignore[override]
        """Connect to the socket of another process; the connection waits until it is accepted."""
        if (end := self.kernel.named[path].connect(self.process.name)) is None:
            raise ConnectionRefusedError
        transport = Transport(self, end, factory())
        return transport, transport.protocol

    async def create_unix_server(self, factory: Any, sock: "Listener") -> Any:  # type: ignore[override]
        """Accept the connections of other processes."""

        def accept() -> None:
            while sock.queue:
                Transport(self, sock.accept()[0], factory())

        self.add_reader(sock, accept)
        return SimpleNamespace(close=lambda: self.remove_reader(sock))

    async def connect_read_pipe(self, factory: Any, pipe: "Pipe") -> Any:
        """Read what another process writes into a pipe."""
        protocol = factory()
        protocol.connection_made(asyncio.Transport())
        pipe.reader = self, protocol
        return asyncio.Transport(), protocol


class Pipe:
    """A pipe from one process to the event loop of another."""

    reader: tuple[Loop, Any] | None = None

    def write(self, data: bytes) -> None:
        if self.reader and self.reader[0].process.is_alive:
            self.reader[0].call_soon_threadsafe(self.reader[1].data_received, data)

    def end(self) -> None:
        if self.reader and self.reader[0].process.is_alive:
            self.reader[0].call_soon_threadsafe(self.reader[1].eof_received)


class End:
    """One end of a connection; the server's end also has the interface of a socket.

    Attributes:
        peer: the other end.
        address: of the client.
        inbox: what has arrived and is not read; None: the peer sends no more.
        on_arrival: called when something arrives, or when the peer has read.
    """

    def __init__(self, kernel: Kernel, address: str) -> None:
        self.kernel, self.address = kernel, address
        self.peer: End
        self.inbox: deque[bytes | None] = deque()
        self.unread = 0  # bytes that were sent to it and are not read
        self.is_closed = False
        self.on_arrival: Callable[[], None] = lambda: None
        self._arrival = 0.0

    def push(self, data: bytes | None) -> None:
        """Send bytes, or the end, to the peer; they arrive after 0.05 to 1 ms."""
        peer, kernel = self.peer, self.kernel
        if data is not None:
            peer.unread += len(data)
        when = kernel.now + 0.00005 + 0.001 * kernel.random.random() ** 4
        self._arrival = when = max(self._arrival, when)

        def arrive() -> None:
            peer.inbox.append(data)
            peer.on_arrival()

        kernel.call_at(when, arrive)

    def take(self) -> bytes | None:
        """Return what arrived first; None: the peer sends no more."""
        data = self.inbox.popleft()
        if data is None:
            self.inbox.append(None)
            return None
        self.unread -= len(data)
        self.peer.on_arrival()
        return data

    def belongs_to(self, process: Process) -> None:
        """Close the end when a process ends."""
        process.at_end[self] = self._break

    def _break(self) -> None:
        self.on_arrival = lambda: None
        self.close()

    def close(self) -> None:
        """Send no more, and read no more; see `socket.close`."""
        if not self.is_closed:
            self.is_closed = True
            self.push(None)
            if self.peer.is_closed:
                self.peer.peer = self.peer = _NOBODY

    setblocking = staticmethod(bool)  # see `socket.setblocking`

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return what has arrived; see `socket.recv`."""
        if not self.inbox:
            raise BlockingIOError
        if flags & socket.MSG_PEEK:
            return (self.inbox[0] or b"")[:size]
        return self.take() or b""

    def send(self, data: bytes) -> None:
        """See `socket.send`."""
        self.push(data)


class Listener:
    """A listening socket in memory, and its queue of connections."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.queue: deque[End] = deque()
        self.readers: dict[Loop, Callable[[], None]] = {}
        self._told: set[Loop] = set()
        self.is_closed = False
        self.number = 0  # its file descriptor

    def fileno(self) -> int:
        return self.number

    setblocking = staticmethod(bool)  # see `socket.setblocking`

    def accept(self) -> tuple[End, str]:
        if not self.queue:
            raise BlockingIOError
        end = self.queue.popleft()
        end.belongs_to(self.kernel.current.process)
        return end, end.address

    def notify(self) -> None:
        """Call the readers while connections wait."""
        for loop in [*self.readers] if self.queue else ():
            if loop not in self._told and loop.process.is_alive and not loop.is_closed():
                self._told.add(loop)
                loop.call_soon_threadsafe(self._read, loop)

    def _read(self, loop: Loop) -> None:
        self._told.discard(loop)
        if (callback := self.readers.get(loop)) is not None:
            callback()
            self.notify()

    def close(self) -> None:
        """Refuse connections, those too that wait."""
        self.is_closed = True
        for end in self.queue:
            end.close()
        self.queue.clear()

    def connect(self, address: str) -> "End | None":
        """Return the client's end of a new connection; None if it is refused."""
        if self.is_closed or len(self.queue) >= _BACKLOG:
            return None
        client, server = End(self.kernel, address), End(self.kernel, address)
        client.peer, server.peer = server, client
        self.queue.append(server)
        self.notify()
        return client


class Transport(asyncio.Transport):
    """The transport of a server's connection; see `asyncio.Transport`."""

    _HIGH, _LOW = 65_536, 16_384

    def __init__(self, loop: Loop, end: End, protocol: Any) -> None:
        super().__init__({"peername": (end.address, 1), "sockname": ("10.0.0.1", 8000)})
        self._loop, self._end, self.protocol = loop, end, protocol
        self._buffer = b""
        self._is_paused = self._is_closing = self._is_lost = self._is_told = False
        self._has_paused_protocol = False
        end.on_arrival = self._arrived
        end.belongs_to(loop.process)
        protocol.connection_made(self)
        loop.call_soon(self._look)

    def _arrived(self) -> None:
        if not self._is_told and not self._loop.is_closed():
            self._is_told = True
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        """Read what has arrived, and send what the peer has room for."""
        self._is_told = False
        self._flush()
        end = self._end
        while end.inbox and not self._is_paused and not self._is_closing:
            if (data := end.take()) is not None:
                self.protocol.data_received(data)
            else:
                self.protocol.eof_received()
                self.close()
        if self._is_closing and end.peer.is_closed:
            self._buffer = b""
            self._lose()

    def _flush(self) -> None:
        peer = self._end.peer
        if self._buffer and (room := WINDOW - peer.unread) > 0:
            data, self._buffer = self._buffer[:room], self._buffer[room:]
            self._end.push(data)
        if self._has_paused_protocol and len(self._buffer) <= self._LOW:
            self._has_paused_protocol = False
            self.protocol.resume_writing()
        if self._is_closing and not self._buffer:
            self._lose()

    def write(self, data: Any) -> None:
        assert not self._is_closing, "nothing is written to a closed connection"
        if self._end.peer.is_closed:  # a reset follows
            self._loop.call_soon(self.abort)
            return
        self._buffer += data
        self._flush()
        if len(self._buffer) > self._HIGH and not self._has_paused_protocol:
            self._has_paused_protocol = True
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._loop.call_soon(self._look)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        if not self._buffer:
            self._lose()

    def abort(self) -> None:
        self._is_closing = True
        self._buffer = b""
        self._lose()

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._end.on_arrival = lambda: None
            self._loop.call_soon(self._tell_lost)

    def _tell_lost(self) -> None:
        self._end.close()
        self._loop.process.at_end.pop(self._end, None)
        protocol, self.protocol = self.protocol, None
        self._has_paused_protocol = False
        protocol.connection_lost(None)


class Gone(Exception):
    """The server has ended the connection, or refuses it."""


class Late(Exception):
    """Nothing came in time."""


class ClientConnection:
    """The client's end of a connection, which a simulated thread uses.

    Args:
        listener: of the server.
        address: of the client.
    """

    def __init__(self, listener: Listener, address: str) -> None:
        self._kernel = listener.kernel
        self._kernel.sleep(0.0001)
        end = listener.connect(address)
        if end is None:
            raise Gone
        self._end: End = end
        self._waiting: Thread | None = None
        end.on_arrival = self._arrived
        self.received = b""

    def _arrived(self) -> None:
        if self._waiting is not None:
            self._kernel.wake(self._waiting)

    def _wait(self, until: float) -> None:
        if self._kernel.now >= until:
            raise Late
        self._waiting = self._kernel.current
        self._kernel.park(until - self._kernel.now)
        self._waiting = None

    def send(self, data: bytes, until: float) -> None:
        """Send bytes as far as the server reads them; send no more when it has closed."""
        while data and not self._end.peer.is_closed:
            room = WINDOW - self._end.peer.unread
            if room <= 0:
                self._wait(until)
                continue
            self._end.push(data[:room])
            data = data[room:]

    @property
    def is_ended(self) -> bool:
        """Whether the server has closed the connection and everything is read."""
        return bool(self._end.inbox) and self._end.inbox[0] is None

    @property
    def has_something(self) -> bool:
        """Whether something has come that is not read."""
        return bool(self._end.inbox)

    def read(self, until: float) -> bytes:
        """Return some bytes when they have come."""
        while not self._end.inbox:
            self._wait(until)
        if (data := self._end.take()) is None:
            raise Gone
        return data

    def close(self) -> None:
        self._end.on_arrival = _NOBODY.on_arrival
        self._end.close()
