"""An engine process: its front ends, its answers, its figures, and its end."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cloze.model_store import Bundle
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.fair_queue import ExpectedWait, LineKey, Submission, Terms
from cloze.service.batching.scheduler import Scheduler
from cloze.service.errors import EngineFailed, Overloaded, Rejection
from cloze.service.models.served_models import ServedModel
from cloze.service.processes import frames
from cloze.service.processes.engine_process import EngineServer, FrontEndChannel, _exit_soon
from tests.support import encodings
from tests.support.fake_engine import FakeEngine
from tests.support.forked import forked
from tests.support.message_wire import Wire
from tests.support.task_model import manifest

pytestmark = pytest.mark.anyio

LIMITS = SchedulerLimits(
    workers=1, max_batch_tokens=100, max_queue_tokens=1000, stall_timeout_s=60.0
)


class Queue(Scheduler):
    """A scheduler that notes what is submitted and asked; `failure` is raised by admissions."""

    def __init__(self, engine: FakeEngine) -> None:
        self.terms: list[Terms] = []
        self.failure: Exception | None = None
        self.asked: list[tuple[Any, ...]] = []
        super().__init__(engine, LIMITS)
        self.start()

    def submit(self, submission: Submission) -> None:
        self.terms.append(submission.terms)
        if self.failure is not None:
            raise self.failure
        super().submit(submission)

    def expected_wait(self, *asked: Any) -> ExpectedWait:
        self.asked.append(asked)
        return ExpectedWait(2.5, 0.5)


class Process:
    """The parts of an engine process of two models, in this process."""

    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine()
        self.queues = [Queue(self.engine), Queue(FakeEngine())]
        bundles = [Bundle(manifest(), folder), Bundle(manifest(name="other", version=1), folder)]
        models = [
            ServedModel(bundle, queue, lambda precision=precision: precision)  # type: ignore[misc]
            for bundle, queue, precision in zip(bundles, self.queues, ("int8", "fp32"), strict=True)
        ]
        self.server = EngineServer(models)
        self.wire = Wire(frames.decode_answer)
        self.channel = self.connect(self.wire)

    def connect(self, wire: Any) -> FrontEndChannel:
        channel = FrontEndChannel(self.server)
        channel.connection_made(wire)
        return channel

    def receive(self, message: Any) -> None:
        is_run = isinstance(message, frames.Run)
        encoded = frames.encode_run(message) if is_run else frames.encode(message)
        self.channel.received(memoryview(encoded))

    async def answers(self, count: int = 1) -> list[Any]:
        """Return the answers after the greeting, when there are so many."""
        async with asyncio.timeout(20):
            while len(self.wire.sent) < 1 + count:
                await asyncio.sleep(0.001)
        return self.wire.sent[1:]

    def close(self) -> None:
        self.engine.gate.set()
        for queue in self.queues:
            queue.close()


def run(number: int = 7, tokens: int = 3, *, model: int = 0, **terms: Any) -> frames.Run:
    fields = {"deadline": time.monotonic() + 60} | terms
    batch = [encodings.encoding([1] * tokens, embed=True)]
    return frames.Run(number, model, Terms(**fields), batch)


@pytest.fixture
async def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Process]:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    made = Process(tmp_path)
    yield made
    made.close()


async def test_a_greeting_comes_first_and_then_answers(process: Process) -> None:
    deadline = time.monotonic() + 60
    terms = {"client": "someone", "timeout_s": 4.5, "trace": "00-1", "is_bulk": True}
    process.receive(run(deadline=deadline, later_round=True, **terms))
    (answer,) = await process.answers()
    greeting = process.wire.sent[0]
    assert list(greeting.models.items()) == [("tiny@3", "int8"), ("other@1", "fp32")]
    assert process.queues[0].terms == [Terms(deadline, later_round=True, **terms)]
    assert answer.number == 7
    assert answer.outcome.outputs[0]["embedding"].array.tolist() == [3.0]
    assert answer.wait == ExpectedWait(2.5, 0.5)
    assert process.queues[0].asked == [("someone", LineKey(0, 4, is_bulk=True), 3)]
    process.receive(run(8, model=1))
    await process.answers(2)
    assert len(process.queues[1].terms) == 1
    assert process.channel._pending == {}


async def test_a_refusal_is_answered(process: Process) -> None:
    process.queues[0].failure = Overloaded("full", 3.0, Rejection.QUEUE_FULL)
    process.receive(run(9, tokens=5))
    (answer,) = await process.answers()
    assert (answer.number, str(answer.outcome)) == (9, "full")
    assert (answer.outcome.retry_after_s, answer.outcome.reason) == (3.0, Rejection.QUEUE_FULL)
    assert answer.wait == ExpectedWait(2.5, 0.5)
    assert process.queues[0].asked == [("", LineKey(0, 0), 5)]
    assert process.channel._pending == {}


async def test_a_cancelled_request_is_dropped(process: Process) -> None:
    process.engine.gate.clear()
    process.receive(run(1))
    process.engine.entered.wait(20)
    process.receive(run(2))
    process.receive(run(3))
    process.receive(frames.Cancel(2))
    process.receive(frames.Cancel(99))
    assert process.queues[0].state.tokens == 3
    process.engine.gate.set()
    answers = await process.answers(2)
    assert [answer.number for answer in answers] == [1, 3]
    assert process.channel._pending == {}
    assert process.queues[0].state.tokens == 0


async def test_an_error_of_the_engine_is_answered(process: Process) -> None:
    process.engine.poison = lambda _: True
    process.receive(run(1))
    (answer,) = await process.answers()
    assert type(answer.outcome) is EngineFailed
    assert str(answer.outcome) == "the engine cannot run this input (RuntimeError)"
    process.engine.gate.clear()
    process.engine.poison = lambda _: False
    process.engine.entered.clear()
    process.receive(run(2))
    process.engine.entered.wait(20)
    process.channel._pending[2].set_exception(KeyError("x"))
    _, answer = await process.answers(2)
    assert type(answer.outcome) is EngineFailed
    assert str(answer.outcome) == "the engine process failed (KeyError)"


async def test_a_front_end_that_leaves_cancels_its_requests_only(process: Process) -> None:
    process.engine.gate.clear()
    other: Any = Wire(frames.decode_answer)
    channel = process.connect(other)
    process.receive(run(1))
    process.engine.entered.wait(20)
    process.receive(run(2))
    channel.received(memoryview(frames.encode_run(run(1, tokens=5))))
    assert process.queues[0].state.tokens == 8
    process.channel.lost()
    assert process.queues[0].state.tokens == 5
    process.engine.gate.set()
    async with asyncio.timeout(20):
        while len(other.sent) < 2 or process.channel._pending:
            await asyncio.sleep(0.001)
    assert len(process.wire.sent) == 1
    assert process.server.channels == {channel}


def test_a_dead_engine_ends_its_process_though_the_loop_hangs(tmp_path: Path) -> None:
    async def main() -> None:
        threading.Thread(target=_exit_soon, args=[asyncio.get_running_loop()]).start()
        threading.Event().wait(15)

    def run() -> int:
        asyncio.run(main())
        return 7

    with forked(run, tmp_path / "output") as fork:
        assert fork.code() == 1
