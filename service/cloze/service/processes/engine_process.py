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

from cloze.service.batching.fair_queue import Queue, Submission
from cloze.service.core import BatchResult
from cloze.service.errors import EngineFailed, ServiceError
from cloze.service.models.served_models import (
    EngineFactory,
    LocalModels,
    ServedModel,
    close_models,
    onnx_engine,
    open_bundles,
)
from cloze.service.observe.metrics import Metrics
from cloze.service.observe.tracing import make_tracing, with_spans
from cloze.service.processes import frames
from cloze.service.processes.children import ChildConfig, run_child
from cloze.service.server.startup import open_early

log = logging.getLogger("cloze")

_SENDING_S, _LONGEST_EXIT_S = 0.1, 1.0
"""Time to send the last answers of a process whose engine is dead."""


class FrontEndChannel(frames.Channel):
    """The connection to one front end: admits its requests and sends their results."""

    def __init__(self, engine: "EngineServer") -> None:
        super().__init__("a front end")
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, Submission] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        super().connection_made(transport)
        self._engine.channels.add(self)
        self.send(self._engine.greeting)

    def received(self, message: memoryview) -> None:
        """Handle a request or a cancellation."""
        request = frames.decode_request(message)
        if isinstance(request, frames.Run):
            self._submit(request)
        elif (pending := self._pending.get(request.number)) is not None:
            pending.cancel()

    def lost(self) -> None:
        """Cancel the requests of a front end that has exited."""
        for submission in list(self._pending.values()):
            submission.cancel()
        self._engine.channels.remove(self)
        self._engine.changed.set()

    def _submit(self, run: frames.Run) -> None:
        request, queue = Submission(run.terms, run.encodings), self._engine.queues[run.model]
        try:
            queue.submit(request)
        except ServiceError as error:
            request.end(error.with_traceback(None))  # whose frames refer to the request
        self._pending[run.number] = request
        request.add_done_callback(partial(self._finish, run.number, queue))

    def _finish(self, number: int, queue: Queue, request: Future[BatchResult]) -> None:
        """Encode the answer to a request, with the expected wait of a further one like it.

        Called on the thread that ended the request.
        """
        assert isinstance(request, Submission)
        message = None
        if not request.cancelled():
            wait = queue.expected_wait(request.terms.client, request.key, request.tokens)
            outcome = request.exception() or request.result()
            if not isinstance(outcome, (BatchResult, ServiceError)):
                outcome = EngineFailed(f"the engine process failed ({type(outcome).__name__})")
            message = frames.encode_answer(frames.Answer(number, outcome, wait))
        self._loop.call_soon_threadsafe(self._end, number, message)

    def _end(self, number: int, message: bytes | None) -> None:
        del self._pending[number]
        if message is not None:
            self.send(message)


class EngineServer:
    """Accepts front ends.

    Attributes:
        stopping: ends `serve` after the last front end has disconnected.
        greeting: the first message to every front end.
        queues: the queue of each model, then those of encoders of labels.
        channels: the connections to front ends.
        changed: is set when a front end disconnects.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.stopping = asyncio.Event()
        self.queues = [model.queue for model in models]
        self.queues += [model.labels.queue for model in models if model.labels is not None]
        self.channels: set[FrontEndChannel] = set()
        self.changed = asyncio.Event()
        served = {model.bundle.manifest.reference: model.precision() for model in models}
        self.greeting = frames.encode(frames.Greeting(served))

    async def serve(self, listener: socket.socket) -> None:
        """Serve until `stopping` is set and every front end has disconnected.

        Front ends may still need answers when all processes receive SIGTERM at once.
        """
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(partial(FrontEndChannel, self), sock=listener)
        try:
            await self.stopping.wait()
            while self.channels:
                self.changed.clear()
                await self.changed.wait()
        finally:
            server.close()  # else the event loop does not end


async def run_engines(config: ChildConfig, make_engine: EngineFactory | None) -> None:
    """Start the engines, and serve until SIGTERM.

    Raises:
        StartupError: a bundle does not open, or a device is missing.
    """
    bundles = open_bundles(config.settings).bundles
    metrics = Metrics([bundle.manifest.reference for bundle in bundles], shared=True)
    tracing = make_tracing(config.settings)
    loop = asyncio.get_running_loop()
    make = make_engine or onnx_engine(config.settings, config.device_id)
    opener = LocalModels(
        config.settings,
        open_early(config.settings, bundles, make),
        on_batch=with_spans(metrics.observe_batch, tracing),
        on_dead=lambda _: _exit_soon(loop),
    )
    models = opener.open(bundles)
    metrics.queues = lambda: {m.bundle.manifest.reference: m.queue.state for m in models}
    metrics.begin()
    engine = EngineServer(models)
    loop.add_signal_handler(signal.SIGTERM, engine.stopping.set)
    config.report_ready()
    await engine.serve(socket.socket(fileno=config.listener))
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
    return run_child(lambda config: run_engines(config, make_engine))


if __name__ == "__main__":
    sys.exit(main())
