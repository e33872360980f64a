"""One device's engine process: runs the requests of all front ends and sends their results.

The supervisor starts it with ``python -m service.processes.engine_process``. The exit code is 1
when an engine dies, and 2 when the process cannot start.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from types import FrameType

import zmq

from service import server as http_server
from service.core import BatchReport, BatchResult, EngineFailed, Queue, ServiceError, StartupError
from service.metrics import Metrics, write_as
from service.processes import frames, start
from service.served_models import (
    EngineCallbacks,
    EngineFactory,
    ServedModel,
    local_models,
    open_bundles,
)

log = logging.getLogger("cloze")

_POLL_MS = 200
_LOOK_EVERY_S = 0.5
"""Interval of the search for front ends that have exited."""

_UNSENT = 100_000
"""Answers that may wait for a front end to take them; further answers are dropped."""


class FrontEnd:
    """The way back to one front end. Any thread may send."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _UNSENT)
        self._socket.connect(address)
        self._lock = threading.Lock()
        self.pid = int(address.rsplit("-", 1)[1])
        self.running: dict[int, Future[BatchResult]] = {}

    def send(self, message: frames.Frames) -> None:
        """Send a message; drop it if the peer takes no more."""
        with self._lock:
            if self._socket.closed:
                return
            try:
                self._socket.send_multipart(message, zmq.NOBLOCK)
            except zmq.Again:
                log.warning("a front end takes no answers")

    def close(self) -> None:
        """Cancel the requests of a front end that has exited."""
        for future in list(self.running.values()):
            future.cancel()
        with self._lock:
            self._socket.close()


class EngineServer:
    """The loop that receives.

    Args:
        models: the served models.
        metrics: told how much waits.
        address: where to listen.
    """

    def __init__(self, models: list[ServedModel], metrics: Metrics, address: str) -> None:
        self._models, self._metrics = models, metrics
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._front_ends: dict[str, FrontEnd] = {}
        rows = [
            {"reference": model.bundle.manifest.reference, "precision": model.precision()}
            for model in models
        ]
        self._welcome = [frames.WELCOME, json.dumps({"pid": os.getpid(), "models": rows}).encode()]
        self.stopping = False

    def serve(self) -> None:
        """Handle messages until `stopping` is set and no front end is left."""
        looked = time.monotonic()
        while not self.stopping or self._front_ends:
            if self._socket.poll(_POLL_MS):
                self._handle(self._socket.recv_multipart())
            if self.stopping or time.monotonic() - looked > _LOOK_EVERY_S:
                looked = time.monotonic()
                self._drop_gone()
            for model in self._models:
                self._metrics.observe_queue(
                    model.bundle.manifest.reference, model.queue.queued_tokens
                )

    def _handle(self, message: list[bytes]) -> None:
        kind, address, rest = message[0], message[1].decode(), [message[0], *message[2:]]
        if kind == frames.HELLO:
            self._greet(address)
        elif (front_end := self._front_ends.get(address)) is None:
            log.warning("a front end that did not say hello")
        elif kind == frames.RUN:
            self._run(front_end, frames.decode_run(rest))
        elif (
            kind == frames.CANCEL
            and (future := front_end.running.get(frames.decode_cancel(rest))) is not None
        ):
            future.cancel()

    def _greet(self, address: str) -> None:
        if address not in self._front_ends:
            self._front_ends[address] = FrontEnd(self._context, address)
        self._front_ends[address].send(self._welcome)

    def _drop_gone(self) -> None:
        """Nobody waits for what a front end asked that ended."""
        for gone in [
            known for known, front_end in self._front_ends.items() if not _is_alive(front_end.pid)
        ]:
            self._front_ends.pop(gone).close()

    def _run(self, front_end: FrontEnd, asked: frames.Run) -> None:
        try:
            future = self._models[asked.model].queue.submit(
                asked.encodings, asked.deadline, accepted=asked.accepted
            )
        except ServiceError as error:
            front_end.send(frames.encode_fail(asked.number, error))
            return
        front_end.running[asked.number] = future
        future.add_done_callback(lambda ended: _answer(front_end, asked.number, ended))


def _answer(front_end: FrontEnd, number: int, future: Future[BatchResult]) -> None:
    """On a worker's thread: send what came out."""
    front_end.running.pop(number, None)
    if future.cancelled():
        return
    error = future.exception()
    if error is None:
        front_end.send(frames.encode_done(number, future.result()))
    else:
        known = (
            error
            if isinstance(error, ServiceError)
            else EngineFailed(f"the engine process failed ({type(error).__name__})")
        )
        front_end.send(frames.encode_fail(number, known))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main(make_engine: EngineFactory | None = None) -> int:
    """Serve until SIGTERM; returns the exit code."""
    config = start.ChildConfig.from_arguments()
    http_server.begin(config.settings)
    write_as(config.name)
    try:
        bundles = open_bundles(config.settings)
        references = [bundle.manifest.reference for bundle in bundles]
        metrics = Metrics(references, shared=True)

        def die(_: str) -> None:
            logging.shutdown()
            os._exit(1)

        queues: dict[str, Queue] = {}

        def observe(model: str, report: BatchReport) -> None:
            metrics.observe_batch(model, report)
            if model in queues:
                metrics.observe_queue(model, queues[model].queued_tokens)

        models = local_models(
            config.settings,
            bundles,
            EngineCallbacks(observe, die),
            make_engine,
            device_id=config.device_id,
        )
    except StartupError as error:
        sys.stderr.write(f"cloze: {error}\n")
        return 2
    queues |= {model.bundle.manifest.reference: model.queue for model in models}
    server = EngineServer(models, metrics, f"ipc://{config.folder}/{config.name}")

    def stop(_: int, __: FrameType | None) -> None:
        server.stopping = True

    signal.signal(signal.SIGTERM, stop)
    config.say_ready()
    server.serve()
    for model in models:
        model.queue.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
