"""One front-end process: speaks HTTP, validates and tokenizes; its engines are other processes.

The supervisor starts it with ``python -m cloze.service.processes.frontend``. Requests go to an
engine process, and its answers end their futures, all on the event loop. The supervisor holds the
listening socket of each engine, so a connection that is opened while no engine runs waits in the
socket's backlog, and the next engine process accepts it.
"""

import asyncio
import itertools
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cloze.service.batching.fair_queue import NO_WAIT, ExpectedWait, LineKey, QueueState, Submission
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import BatchResult
from cloze.service.errors import EngineDead, ShuttingDown
from cloze.service.models.served_models import ServedModel, open_bundles
from cloze.service.observe.metrics import Metrics
from cloze.service.observe.tracing import make_tracing
from cloze.service.processes import frames
from cloze.service.processes.children import ChildConfig, run_child
from cloze.service.protocols.operations import QUIET_ROUTES
from cloze.service.server.process import answer_http
from cloze.service.service import Service

_ENGINE_WAIT_S = 5.0
"""Longest time that a front end waits for an engine before it accepts connections.

A restarted front end must not answer 503 beside others that are ready. Without any engine it must
still answer probes.
"""


@dataclass(slots=True)
class _Pending:
    """A request without an answer, and the number of engine processes that got it."""

    model: int
    submission: Submission
    sent: int = 0


class EngineLink(frames.Channel):
    """This front end's connection to one engine process, and to the processes that replace it.

    Args:
        path: of the engine's listening socket.
        references: the models that this front end serves.
        up: is set after the first greeting of any engine.

    Attributes:
        dead_reason: why no engine runs; None while one runs.
        precisions: of the graphs of the models; empty before the first greeting.
        tokens: of the requests that are not answered.
    """

    _MAX_WAITS = 4096  # lines whose expected wait is kept
    _WAIT_HOLDS_S = 1.0  # then the engine process decides again, since its queue may be empty
    _MAX_KEPT_TOKENS = 262_144  # most tokens of requests that wait for the next engine process

    def __init__(
        self, path: Path, references: Sequence[str], up: asyncio.Event, clock: Clock = CLOCK
    ) -> None:
        super().__init__(path.stem)
        self._path = path
        self._references = list(references)
        self._up = up
        self._clock = clock
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        # (model, client, line) -> expected wait, and the time of the figure
        self._waits: dict[tuple[int, str, LineKey], tuple[ExpectedWait, float]] = {}
        self._closed = False
        self._ended = asyncio.Event()
        self.dead_reason: str | None = f"{self.peer} has not started yet"
        self.precisions: Sequence[str] = ()
        self.tokens = 0

    async def run(self) -> None:
        """Stay connected until cancelled.

        Raises:
            OSError: the socket does not exist, because the server ends.
        """
        loop = asyncio.get_running_loop()
        while True:
            self._ended.clear()
            await loop.create_unix_connection(lambda: self, str(self._path))
            try:
                await self._ended.wait()
            except asyncio.CancelledError:
                self.shut_down()
                raise
            finally:
                self.close()

    def submit(self, model: int, submission: Submission) -> None:
        """Send a request; see `fair_queue.Queue`."""
        if self._closed:
            raise ShuttingDown("the server is shutting down")
        if self.dead_reason is not None and (
            not self.keeps_requests or self.tokens + submission.tokens > self._MAX_KEPT_TOKENS
        ):
            raise EngineDead(f"the engine is dead: {self.dead_reason}")
        number, pending = next(self._numbers), _Pending(model, submission)
        if self.dead_reason is None:
            self._send(number, pending)
        self.tokens += submission.tokens
        self._pending[number] = pending
        submission.add_done_callback(partial(self._forget, number))

    @property
    def keeps_requests(self) -> bool:
        """Whether requests wait, until their deadlines, for the process that replaces one."""
        return self.dead_reason is not None and bool(self.precisions)

    def expected_wait(self, model: int, client: str, line: LineKey) -> ExpectedWait:
        """Return the wait that the engine process reported just now, less the time since then."""
        wait, reported = self._waits.get((model, client, line), (NO_WAIT, 0.0))
        if (passed_s := self._clock.monotonic() - reported) > self._WAIT_HOLDS_S:
            return NO_WAIT
        return wait._replace(seconds=max(0.0, wait.seconds - passed_s))

    def shut_down(self) -> None:
        """Refuse requests, and fail those that are not answered."""
        self._closed = True
        message = "the server shut down before this request was answered"
        for pending in list(self._pending.values()):
            pending.submission.end(ShuttingDown(message))

    def received(self, message: memoryview) -> None:
        """Handle a greeting or an answer."""
        decoded = frames.decode_answer(message)
        if isinstance(decoded, frames.Answer):
            if (pending := self._pending.get(decoded.number)) is not None:  # else cancelled
                if len(self._waits) >= self._MAX_WAITS:
                    self._waits.clear()
                submission = pending.submission
                line = pending.model, submission.terms.client, submission.key
                self._waits[line] = decoded.wait, self._clock.monotonic()
                submission.end(decoded.outcome)
        elif [*decoded.models] == self._references:
            self.precisions = [*decoded.models.values()]
            self.dead_reason = None
            self._up.set()
            for number, pending in list(self._pending.items()):
                if pending.sent:  # what the last process admitted stays admitted
                    submission = pending.submission
                    submission.terms = submission.terms._replace(later_round=True)
                self._send(number, pending)
        else:
            self.dead_reason = f"{self.peer} serves other models than this front end"

    def lost(self) -> None:
        """Keep the requests that are not answered for the next engine process.

        A request waits until its deadline, at which `RequestLimits` cancels its work. A request
        that was sent twice fails: it may be what ended both processes.
        """
        self.dead_reason = f"the process of {self.peer} ended"
        for pending in list(self._pending.values()):
            if pending.sent > 1:
                pending.submission.end(EngineDead(f"the engine is dead: {self.dead_reason}"))
        self._ended.set()

    def _send(self, number: int, pending: _Pending) -> None:
        pending.sent += 1
        submission = pending.submission
        run = frames.Run(number, pending.model, submission.terms, submission.encodings)
        self.send(frames.encode_run(run))

    def _forget(self, number: int, submission: Future[BatchResult]) -> None:
        assert isinstance(submission, Submission)
        del self._pending[number]
        self.tokens -= submission.tokens
        if submission.cancelled() and self.dead_reason is None:
            self.send(frames.encode(frames.Cancel(number)))


class RemoteQueue:
    """A model's queue in the engine processes; see `fair_queue.Queue`.

    Call `submit` on the event loop that created the queue; any thread may call the other methods.

    Args:
        links: to every engine process.
        model: the model's index in every engine process.
    """

    def __init__(self, links: Sequence[EngineLink], model: int) -> None:
        self._links = links
        self._model = model
        self._loop = asyncio.get_running_loop()

    @property
    def state(self) -> QueueState:
        """Tokens of this front end's requests, of all models, that are not answered.

        The engine processes measure their rates, and report them as metrics.
        """
        return QueueState(sum(link.tokens for link in self._links), backlog_s=0.0)

    @property
    def dead_reason(self) -> str | None:
        """Why no engine runs; None while one runs."""
        reasons = [link.dead_reason for link in self._links]
        return None if None in reasons else "; ".join(filter(None, reasons))

    def submit(self, submission: Submission) -> None:
        """Send a request to the running engine with the fewest tokens; see `fair_queue.Queue`.

        The engine bounds its queue: the request fails with `Overloaded` if the queue is full.
        """
        running = [link for link in self._links if link.dead_reason is None]
        keeping = [link for link in self._links if link.keeps_requests]
        link = min(running or keeping or self._links, key=lambda link: link.tokens)
        link.submit(self._model, submission)

    def expected_wait(
        self,
        client: str,
        line: LineKey,
        tokens: int,  # noqa: ARG002
        unsubmitted: int = 0,  # noqa: ARG002
    ) -> ExpectedWait:
        """Return the shortest wait that an engine process reported; see `fair_queue.Queue`."""
        running = [link for link in self._links if link.dead_reason is None]
        waits = (link.expected_wait(self._model, client, line) for link in running)
        return min(waits, default=NO_WAIT)

    def precision(self) -> str:
        """Return the precision of the graph that an engine runs; empty before the greeting."""
        served = (link.precisions[self._model] for link in self._links if link.precisions)
        return next(served, "")

    def close(self, timeout_s: float = 5.0) -> None:  # noqa: ARG002  # there is no thread to join
        """Fail pending requests with `ShuttingDown`, on the event loop."""
        for link in self._links:
            self._loop.call_soon_threadsafe(link.shut_down)


async def run_front_end(config: ChildConfig) -> None:
    """Answer HTTP until SIGTERM.

    Raises:
        StartupError: a bundle, the keys or the certificate cannot be opened.
    """
    up = asyncio.Event()
    bundles = open_bundles(config.settings).bundles
    links = [EngineLink(path, config.settings.model, up) for path in config.engine_sockets]
    numbers = itertools.count(len(bundles))  # encoders of labels follow; see `EngineServer`
    models = []
    for number, bundle in enumerate(bundles):
        queue, labels = RemoteQueue(links, number), None
        if (encoder := bundle.label_encoder) is not None:
            labels = ServedModel(encoder, RemoteQueue(links, next(numbers)), queue.precision)
        models.append(ServedModel(bundle, queue, queue.precision, labels=labels))
    service = Service(
        config.settings,
        Metrics(shared=True),
        models,
        tracing=make_tracing(config.settings, QUIET_ROUTES),
    )
    service.certificate.load()  # an error in the group would be no `StartupError`
    async with asyncio.TaskGroup() as tasks:
        connections = [tasks.create_task(link.run()) for link in links]
        with suppress(TimeoutError):
            await asyncio.wait_for(up.wait(), _ENGINE_WAIT_S)
        await answer_http(
            service,
            config.settings,
            socket.socket(fileno=config.listener),
            before_accepting=config.report_ready,
        )
        for connection in connections:
            connection.cancel()


def main() -> int:
    """Serve until SIGTERM; return the exit code."""
    return run_child(run_front_end)


if __name__ == "__main__":
    sys.exit(main())
