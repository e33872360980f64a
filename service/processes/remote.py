"""The queue as a front end sees it: requests go to an engine process, futures end with its answers.

One thread per link receives. The end of an engine process is seen at its process descriptor: its
pending requests fail at once, and the link waits for the next engine process.
"""

import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from model_store.batch import Encoding
from service.core import BatchResult, EngineDead, ServiceError, ShuttingDown
from service.processes import frames

log = logging.getLogger("cloze")

_HELLO_EVERY_MS = 50


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """How an engine process runs a model."""

    reference: str
    precision: str


class Link:
    """The connection of this front end to one engine process, and to those that take its place.

    Args:
        context: of zmq.
        folder: of the sockets.
        name: the engine's.
        references: of the models that this front end knows.
        came: set once an engine is there.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        folder: Path,
        name: str,
        references: Sequence[str],
        came: threading.Event,
    ) -> None:
        self._came = came
        self.models: list[RemoteModel] = []
        """What the engine runs; none before it has said so."""
        self._references = list(references)
        self.tokens = 0
        """Of requests that are not answered."""
        self._name = name
        self._closing = False
        self._dead: str | None = f"engine {name} is not up yet"
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[Future[BatchResult], int]] = {}
        self._lock = threading.Lock()  # guards all above and the sending socket
        self._address = f"ipc://{folder}/{name}-{os.getpid()}"
        self._to = context.socket(zmq.PUSH)
        self._to.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for an engine that is not there
        self._to.setsockopt(zmq.LINGER, 0)
        self._to.setsockopt(zmq.SNDHWM, 0)  # the engine bounds its queue, and says so
        self._to.connect(f"ipc://{folder}/{name}")
        self._from = context.socket(zmq.PULL)
        self._from.setsockopt(zmq.RCVHWM, 0)
        self._from.bind(self._address)
        threading.Thread(target=self._receive, name=f"link-{name}", daemon=True).start()

    @property
    def dead(self) -> str | None:
        """Why no engine is there; None while one is."""
        return self._dead

    def submit(
        self, model: int, encodings: Sequence[Encoding], deadline: float, *, accepted: bool
    ) -> Future[BatchResult]:
        """Send a request; see `core.Queue`."""
        future: Future[BatchResult] = Future()
        tokens = sum(map(len, encodings))
        with self._lock:
            if self._closing:
                raise ShuttingDown("the server is shutting down")
            if self._dead is not None:
                raise EngineDead(f"the engine is dead: {self._dead}")
            number = next(self._numbers)
            message = frames.encode_run(
                frames.Run(number, deadline, model, accepted, list(encodings))
            )
            self._pending[number] = (
                future,
                tokens,
            )  # before it is sent: the answer may be quicker than we are
            self.tokens += tokens
            try:
                self._send(message)
            except zmq.Again:
                del self._pending[number]
                self.tokens -= tokens
                raise EngineDead(f"the engine is dead: engine {self._name} takes nothing") from None
        future.add_done_callback(lambda ended: self._forget(number, ended))
        return future

    def fail_all(self, make_error: Callable[[], ServiceError]) -> None:
        """End what is pending."""
        with self._lock:
            pending = [future for future, _ in self._pending.values()]
        for future in pending:
            _settle(future, make_error())

    def close(self) -> None:
        """End what is pending; nothing is received any more."""
        with self._lock:
            self._closing = True
        self.fail_all(lambda: ShuttingDown("the server shut down before this request was answered"))

    def _forget(self, number: int, future: Future[BatchResult]) -> None:
        with self._lock:
            if (known := self._pending.pop(number, None)) is None:
                return
            self.tokens -= known[1]
            if future.cancelled() and self._dead is None:
                try:
                    self._send(frames.encode_cancel(number))
                except zmq.Again:
                    log.debug("engine %s takes no cancellation", self._name)
        if future.cancelled():
            future.set_running_or_notify_cancel()  # tells those who wait on it in other threads

    def _send(self, message: frames.Frames) -> None:
        """Send a message with the address of its answer; the caller holds the lock.

        Raises:
            zmq.Again: no engine takes the message.
        """
        self._to.send_multipart([message[0], self._address.encode(), *message[1:]], zmq.NOBLOCK)

    # ---- the receiving thread ------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            self._receive_all()
        except BaseException:  # without this thread no request is answered: end the process
            log.exception("the link to %s failed", self._name)
            logging.shutdown()
            os._exit(1)

    def _receive_all(self) -> None:
        poller = zmq.Poller()
        poller.register(self._from, zmq.POLLIN)
        engine: int | None = None  # descriptor of its process
        while not self._closing:
            if engine is None:
                self._say_hello()
            ready = dict(poller.poll(_HELLO_EVERY_MS if engine is None else 500))
            if self._from in ready:
                engine = self._handle(self._from.recv_multipart(), poller, engine)
            elif engine is not None and engine in ready:
                poller.unregister(engine)
                os.close(engine)
                engine = None
                self._engine_ended(f"the process of engine {self._name} ended")

    def _say_hello(self) -> None:
        with self._lock:
            try:
                self._send([frames.HELLO])
            except zmq.Again:
                return  # nobody is there yet

    def _handle(self, message: list[bytes], poller: zmq.Poller, engine: int | None) -> int | None:
        """One message; returns the descriptor of the engine's process."""
        if message[0] == frames.WELCOME:
            return (
                engine if engine is not None else self._engine_came(json.loads(message[1]), poller)
            )
        if message[0] == frames.DONE:
            number, answer = frames.decode_done(message)
            if (known := self._pending.get(number)) is not None:  # else it was cancelled
                _settle(known[0], answer)
        elif message[0] == frames.FAIL:
            number, error = frames.decode_fail(message)
            if (known := self._pending.get(number)) is not None:
                _settle(known[0], error)
        return engine

    def _engine_came(self, told: dict[str, Any], poller: zmq.Poller) -> int | None:
        models = [RemoteModel(**model) for model in told["models"]]
        if [model.reference for model in models] != self._references:
            with self._lock:
                self._dead = f"engine {self._name} serves other models than this front end"
            return None
        try:
            engine = os.pidfd_open(told["pid"])
        except (
            OSError
        ):  # it is gone again, or there is no descriptor left: it will be asked once more
            return None
        poller.register(engine, zmq.POLLIN)
        with self._lock:
            self.models = models
            self._dead = None
        self._came.set()
        return engine

    def _engine_ended(self, reason: str) -> None:
        with self._lock:
            self._dead = reason
        self.fail_all(lambda: EngineDead(f"the engine is dead: {reason}"))


def _settle(future: Future[BatchResult], outcome: BatchResult | ServiceError) -> None:
    try:
        if isinstance(outcome, ServiceError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        pass  # it was cancelled a moment ago


class RemoteQueue:
    """A model's queue, wherever it is; see `core.Queue`.

    Args:
        links: to every engine process.
        model: its index there.
    """

    def __init__(self, links: Sequence[Link], model: int) -> None:
        self._links, self._model = links, model
        self._draining = False

    @property
    def queued_tokens(self) -> int:
        """Tokens of this front end's requests, of all models, that are not answered."""
        return sum(link.tokens for link in self._links)

    @property
    def dead(self) -> str | None:
        """Why no engine is there; None while one is."""
        reasons = [link.dead for link in self._links]
        return None if None in reasons else "; ".join(reason for reason in reasons if reason)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def submit(
        self, encodings: Sequence[Encoding], deadline: float, *, accepted: bool = False
    ) -> Future[BatchResult]:
        """See `core.Queue`; that the engine's queue is full, the future says."""
        if self._draining and not accepted:
            raise ShuttingDown("the server is shutting down")
        alive = [link for link in self._links if link.dead is None]
        link = min(alive or self._links, key=lambda link: link.tokens)
        return link.submit(self._model, encodings, deadline, accepted=accepted)

    def precision(self) -> str:
        """Of the graph that an engine runs; empty before one has said so."""
        return next((link.models[self._model].precision for link in self._links if link.models), "")

    def drain(self) -> None:
        """Admit nothing more; what was admitted runs on."""
        self._draining = True

    def close(self, timeout_s: float = 5.0) -> None:  # noqa: ARG002
        """Fail what is still pending."""
        self.drain()
        for link in self._links:
            link.close()
