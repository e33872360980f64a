"""One device's engine process: runs the requests of all front ends and sends their results.

The supervisor starts it with ``python -m cloze.service.processes.engine_process``. The event loop,
on the main thread, owns the connections; the schedulers own the threads that run batches. The exit
code is 1 when an engine dies, and 2 when the process cannot start.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import uvloop

from cloze.service import server
from cloze.service.core import (
    BatchReport,
    BatchResult,
    EngineFailed,
    ExpectedWait,
    Queue,
    ServiceError,
    StartupError,
)
from cloze.service.metrics import Metrics, write_as
from cloze.service.processes import frames
from cloze.service.processes.children import ChildConfig
from cloze.service.served_models import (
    EngineCallbacks,
    EngineFactory,
    LocalModels,
    ServedModel,
    close_models,
    open_bundles,
)
from cloze.service.tracing import make_tracing, with_spans

log = logging.getLogger("cloze")

_SENDING_S, _LONGEST_EXIT_S = 0.1, 1.0
"""Time to send the last answers of a process whose engine is dead."""


class FrontEndChannel(frames.Channel):
    """The connection to one front end: admits its requests and sends their results.

    Args:
        engine: the server that accepted the connection.
        max_unsent_bytes: a front end that leaves more unread is dropped.
    """

    def __init__(self, engine: "EngineServer", max_unsent_bytes: int) -> None:
        super().__init__("a front end", max_unsent_bytes)
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, Future[BatchResult]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        super().connection_made(transport)
        self._engine.opened(self)
        self.send(self._engine.greeting)

    def received(self, message: memoryview) -> None:
        """Handle a request or a cancellation."""
        request = frames.decode_request(message)
        if isinstance(request, frames.Run):
            self._submit(request)
        elif (future := self._pending.get(request.number)) is not None:
            future.cancel()

    def lost(self) -> None:
        """Cancel the requests of a front end that has exited."""
        for future in list(self._pending.values()):
            future.cancel()
        self._engine.closed(self)

    def _submit(self, run: frames.Run) -> None:
        tokens = run.submission.tokens
        try:
            future = self._engine.submit(run)
        except ServiceError as error:
            wait = self._engine.expected_wait(run, tokens)
            self.send(frames.encode_answer(frames.Answer(run.number, error, wait)))
            return
        self._pending[run.number] = future
        terms = run._replace(submission=run.submission._replace(encodings=()))  # for the memory
        future.add_done_callback(partial(self._encode_answer, terms, tokens))

    def _encode_answer(self, run: frames.Run, tokens: int, future: Future[BatchResult]) -> None:
        """Encode a request's answer. Called on the thread that ended the future."""
        self._engine.observe_queue(run.model)
        message = None
        if not future.cancelled():
            wait = self._engine.expected_wait(run, tokens)
            message = frames.encode_answer(frames.Answer(run.number, _outcome(future), wait))
        self._loop.call_soon_threadsafe(self._end, run.number, message)

    def _end(self, number: int, message: bytes | None) -> None:
        del self._pending[number]
        if message is not None:
            self.send(message)


def _outcome(future: Future[BatchResult]) -> BatchResult | ServiceError:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, ServiceError):
        return error
    return EngineFailed(f"the engine process failed ({type(error).__name__})")


class EngineServer:
    """Accepts front ends and admits their requests.

    Args:
        models: the served models.
        metrics: records the length of each queue.
        max_unsent_bytes: a front end that leaves more unread is dropped.

    Attributes:
        greeting: the first message to every front end.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        metrics: Metrics,
        max_unsent_bytes: int = frames.MAX_UNSENT_BYTES,
    ) -> None:
        self._queues = [model.queue for model in models]
        self._references = [model.bundle.manifest.reference for model in models]
        self._metrics = metrics
        self._max_unsent_bytes = max_unsent_bytes
        self._channels: set[FrontEndChannel] = set()
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()  # set when a front end disconnects
        served = map(frames.EngineModel, self._references, [model.precision() for model in models])
        self.greeting = frames.encode(frames.Greeting(list(served)))

    async def serve(self, listener: socket.socket) -> None:
        """Serve until `stop` is called and every front end has disconnected.

        Front ends may still need answers when all processes receive SIGTERM at once.
        """
        for model in range(len(self._queues)):  # the series exist before the first request
            self.observe_queue(model)
        loop = asyncio.get_running_loop()
        make_channel = partial(FrontEndChannel, self, self._max_unsent_bytes)
        server = await loop.create_unix_server(make_channel, sock=listener)
        try:
            await self._stopping.wait()
            while self._channels:
                self._changed.clear()
                await self._changed.wait()
        finally:
            server.close()  # else the event loop does not end

    def stop(self) -> None:
        """End `serve` after the last front end has disconnected."""
        self._stopping.set()

    def submit(self, run: frames.Run) -> Future[BatchResult]:
        """Admit a request; see `core.Queue`."""
        future = self._queues[run.model].submit(run.submission)
        self.observe_queue(run.model)
        return future

    def expected_wait(self, run: frames.Run, tokens: int) -> ExpectedWait:
        """Return the expected wait of a further request like a request of so many tokens."""
        terms = run.submission
        return self._queues[run.model].expected_wait(terms.client, tokens, terms.timeout_s)

    def observe_queue(self, model: int) -> None:
        """Record how many tokens wait. Any thread may call this."""
        self._metrics.observe_queue(self._references[model], self._queues[model].state)

    def opened(self, channel: FrontEndChannel) -> None:
        """Add a front end."""
        self._channels.add(channel)

    def closed(self, channel: FrontEndChannel) -> None:
        """Remove a front end that has disconnected."""
        self._channels.remove(channel)
        self._changed.set()


class BatchObserver:
    """Records each batch, and the queue that the batch has left.

    Args:
        metrics: of this process.

    Attributes:
        queues: by the model's full name; set before the first request.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.queues: dict[str, Queue] = {}

    def on_batch(self, reference: str, report: BatchReport) -> None:
        """Record a batch. Called on a worker thread."""
        self._metrics.observe_batch(reference, report)
        self._metrics.observe_queue(reference, self.queues[reference].state)


async def run_engines(config: ChildConfig, make_engine: EngineFactory | None) -> None:
    """Start the engines, and serve until SIGTERM.

    Raises:
        StartupError: a bundle does not open, or a device is missing.
    """
    bundles = open_bundles(config.settings)
    metrics = Metrics([bundle.manifest.reference for bundle in bundles], shared=True)
    metrics.begin()
    tracing = make_tracing(config.settings)
    observer = BatchObserver(metrics)
    loop = asyncio.get_running_loop()
    callbacks = EngineCallbacks(with_spans(observer.on_batch, tracing), lambda _: _exit_soon(loop))
    opener = LocalModels(config.settings, callbacks, make_engine, device_id=config.device_id)
    models = opener.open(bundles)
    observer.queues = {model.bundle.manifest.reference: model.queue for model in models}
    engine = EngineServer(models, metrics)
    loop.add_signal_handler(signal.SIGTERM, engine.stop)
    config.report_ready()
    await engine.serve(socket.socket(fileno=config.listeners[0]))
    close_models(models)
    if tracing is not None:
        tracing.close()


def _exit_soon(loop: asyncio.AbstractEventLoop) -> None:
    """End the process once its answers are sent; the supervisor restarts it.

    A front end sends a request again that got no answer. So the run that hangs would get a second
    engine process. A timer of its own ends the process even if the event loop hangs too.
    """
    threading.Timer(_LONGEST_EXIT_S, _exit_dead).start()
    loop.call_soon_threadsafe(loop.call_later, _SENDING_S, _exit_dead)


def _exit_dead() -> None:
    logging.shutdown()
    os._exit(1)


def main(make_engine: EngineFactory | None = None) -> int:
    """Serve until SIGTERM; return the exit code.

    Args:
        make_engine: opens a bundle's engine; None: onnxruntime does.
    """
    config = ChildConfig.from_arguments()
    server.begin(config.settings)
    write_as(config.name)
    try:
        uvloop.run(run_engines(config, make_engine))
    except StartupError as error:
        sys.stderr.write(f"cloze: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
