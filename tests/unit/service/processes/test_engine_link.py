"""The queue of a front end, with engine processes that are played by hand."""

import asyncio
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloze.model_store.batch import Encoding
from cloze.service.batching.fair_queue import NO_WAIT, ExpectedWait, LineKey, Submission
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import BatchResult
from cloze.service.errors import EngineDead, Overloaded, ShuttingDown
from cloze.service.processes import frames
from cloze.service.processes.frontend import EngineLink, RemoteQueue
from tests.support.encodings import submit
from tests.support.leaping_loop import LEAPING
from tests.support.message_wire import Wire
from tests.support.refusals import refused
from tests.support.virtual_time import VirtualClock

pytestmark = pytest.mark.anyio

leaping = pytest.mark.parametrize("anyio_backend", [LEAPING])


class Engines:
    """Links to engine processes, and a queue on them."""

    def __init__(self, count: int = 1, clock: Clock = CLOCK) -> None:
        self.up = asyncio.Event()
        self.links = [
            EngineLink(Path(f"engine-{n}.sock"), ["bert@1"], self.up, clock) for n in range(count)
        ]
        self.queue = RemoteQueue(self.links, 0)

    def start(self, number: int = 0, reference: str = "bert@1") -> Wire:
        wire: Any = Wire(frames.decode_request)
        self.links[number].connection_made(wire)
        greeting = frames.Greeting({reference: "int8"})
        self.links[number].received(memoryview(frames.encode(greeting)))
        return wire

    def answer(self, number: int, run: frames.Run, outcome: Any, wait_s: float = 0.0) -> None:
        wait = ExpectedWait(wait_s, 0.0)
        message = frames.encode_answer(frames.Answer(run.number, outcome, wait))
        self.links[number].received(memoryview(message))

    def wait(self, client: str = "a", tokens: int = 3, timeout_s: Any = None) -> ExpectedWait:
        return self.queue.expected_wait(client, LineKey.of(tokens, timeout_s), tokens)

    def submit(self, tokens: int = 3, **options: Any) -> Submission:
        array = np.arange(tokens, dtype=np.int32)
        return submit(self.queue, [Encoding(array, array)], time.monotonic() + 60, **options)


def started() -> tuple[Engines, Wire]:
    engines = Engines()
    return engines, engines.start()


RESULT = BatchResult([{}], 0.25, 0.5)


async def test_a_request_is_sent_and_answered() -> None:
    engines = Engines()
    assert engines.queue.dead_reason == "engine-0 has not started yet"
    assert engines.queue.precision() == ""
    with refused("engine_dead"):
        engines.submit()
    wire = engines.start()
    assert engines.up.is_set()
    assert engines.queue.dead_reason is None
    assert engines.queue.precision() == "int8"
    future = engines.submit(3, client="someone", timeout_s=2.5, trace="t")
    assert engines.queue.state.tokens == 3
    (run,) = wire.sent
    sent = run.terms
    assert (sent.client, sent.timeout_s, sent.trace) == ("someone", 2.5, "t")
    assert (run.model, sent.later_round) == (0, False)
    engines.answer(0, run, RESULT)
    assert future.result(0).queue_s == 0.25
    assert engines.queue.state.tokens == 0
    engines.answer(0, run, RESULT)  # a late answer belongs to nobody
    failed = engines.submit(3, is_bulk=True, later_round=True)
    assert wire.sent[1].terms[-2:] == (True, True)
    engines.answer(0, wire.sent[1], Overloaded("full", 7))
    assert isinstance(failed.exception(0), Overloaded)
    assert engines.queue.state.tokens == 0


async def test_requests_go_to_the_running_engine_with_the_fewest_tokens() -> None:
    engines = Engines(3)
    one, two = engines.start(0), engines.start(1)
    for tokens in (5, 3, 1, 1):
        engines.submit(tokens)
    assert [len(run.encodings[0]) for run in one.sent] == [5]
    assert [len(run.encodings[0]) for run in two.sent] == [3, 1, 1]
    assert engines.queue.state.tokens == 10


async def test_a_cancelled_request_is_cancelled_at_the_engine() -> None:
    engines, wire = started()
    future = engines.submit()
    assert future.cancel()
    assert wire.sent[-1] == frames.Cancel(wire.sent[0].number)
    assert engines.queue.state.tokens == 0
    assert future.done()


async def test_requests_wait_for_the_process_that_replaces_theirs() -> None:
    engines, first = started()
    sent = engines.submit(3)
    engines.links[0].lost()
    assert engines.queue.dead_reason == "the process of engine-0 ended"
    assert engines.links[0].keeps_requests
    kept = engines.submit(4)
    assert len(first.sent) == 1
    cancelled = engines.submit(5)
    cancelled.cancel()
    second = engines.start()
    assert not engines.links[0].keeps_requests
    assert [len(run.encodings[0]) for run in second.sent] == [3, 4]
    later = [run.terms.later_round for run in second.sent]
    assert later == [True, False], "one was admitted before"
    for run, one in zip(second.sent, (sent, kept), strict=True):
        assert not one.done()
        engines.answer(0, run, RESULT)
        assert one.result(0)


async def test_a_request_that_was_sent_to_two_engines_is_given_up() -> None:
    engines, _ = started()
    twice = engines.submit()
    engines.links[0].lost()
    engines.start()
    once = engines.submit()
    engines.links[0].lost()
    assert isinstance(twice.exception(0), EngineDead)
    assert not once.done()


async def test_a_closed_queue_fails_what_is_pending() -> None:
    engines, _ = started()
    future = engines.submit()
    engines.queue.close()
    with refused("shutting_down"):
        await asyncio.wrap_future(future)
    with pytest.raises(ShuttingDown):
        engines.submit()
    engines.links[0].lost()
    with pytest.raises(ShuttingDown):
        engines.submit()


async def test_the_expected_wait_is_the_shortest_of_the_running_engines() -> None:
    clock = VirtualClock(1000.0)
    engines = Engines(3, clock)
    assert engines.wait() == NO_WAIT
    for number, wait_s in enumerate((5.0, 3.0, 1.0)):
        wire = engines.start(number)
        engines.submit(3, client="a")
        engines.answer(number, wire.sent[-1], RESULT, wait_s)
        engines.links[number].dead_reason = "not now"
    assert engines.wait() == NO_WAIT
    engines.links[0].dead_reason = engines.links[1].dead_reason = None
    assert engines.wait().seconds == 3.0
    assert engines.wait("b") == NO_WAIT
    assert engines.wait(timeout_s=2.5) == NO_WAIT, "another line"
    assert engines.wait(tokens=5000) == NO_WAIT
    clock.now += 0.5
    assert engines.wait().seconds == 2.5
    clock.now += 2.0
    assert engines.wait().seconds == 0.0


async def test_waits_of_many_lines_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineLink._MAX_WAITS == 4096
    monkeypatch.setattr(EngineLink, "_MAX_WAITS", 2)
    engines, wire = started()
    for name, kept in (("a", 1), ("b", 2), ("c", 1)):
        engines.submit(client=name)
        engines.answer(0, wire.sent[-1], RESULT, 3.0)
        assert len(engines.links[0]._waits) == kept
        assert engines.wait(name).seconds > 2.9


async def test_kept_requests_up_to_the_limit_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineLink, "_MAX_KEPT_TOKENS", 10)

    engines, _ = started()
    engines.links[0].lost()
    engines.submit(4)
    engines.submit(6)
    with pytest.raises(EngineDead, match="the engine is dead: the process of engine-0 ended"):
        engines.submit(1)
    wire = engines.start()
    assert len(wire.sent) == 2
    engines.submit(1)
    assert len(wire.sent) == 3, "a running engine bounds its own queue"


async def test_a_link_connects_again_and_closes_at_the_end(tmp_path: Path) -> None:
    accepted: list[asyncio.StreamWriter] = []
    arrived = asyncio.Event()
    greeting = frames.encode(frames.Greeting({"bert@1": "int8"}))

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        writer.write(struct.pack("=I", len(greeting)) + greeting)
        arrived.set()
        await reader.read()
        writer.close()

    path = tmp_path / "engine-7.sock"
    server = await asyncio.start_unix_server(accept, path)
    up = asyncio.Event()
    link = EngineLink(path, ["bert@1"], up)
    running = asyncio.ensure_future(link.run())
    async with asyncio.timeout(20):
        await up.wait()
        assert link.dead_reason is None
        arrived.clear()
        accepted[0].close()
        await arrived.wait()
        while link.dead_reason is not None:
            await asyncio.sleep(0.001)
        assert len(accepted) == 2
        array = np.arange(3, dtype=np.int32)
        queue = RemoteQueue([link], 0)
        future = submit(queue, [Encoding(array, array)], time.monotonic() + 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert isinstance(future.exception(0), ShuttingDown)
        await accepted[1].wait_closed()  # the link has closed its end
    server.close()


@leaping
async def test_no_time_but_the_deadline_ends_the_wait_for_the_next_process() -> None:
    engines, _ = started()
    patient, hasty = engines.submit(3), engines.submit(4)
    engines.links[0].lost()
    await asyncio.sleep(600)
    assert not patient.done()
    hasty.cancel()  # as `RequestWatch` does at the deadline
    kept = engines.submit(5)
    wire = engines.start()
    assert [len(run.encodings[0]) for run in wire.sent] == [3, 5]
    await asyncio.sleep(600)
    for run, one in zip(wire.sent, (patient, kept), strict=True):
        assert not one.done(), "no timer of the replaced process ends it"
        engines.answer(0, run, RESULT)
        assert one.result(0)


@leaping
async def test_an_engine_with_other_models_ends_no_wait() -> None:
    engines, _ = started()
    future = engines.submit()
    engines.links[0].lost()
    engines.start(reference="bert@2")
    assert engines.links[0].keeps_requests
    assert engines.queue.dead_reason == "engine-0 serves other models than this front end"
    await asyncio.sleep(60)
    assert not future.done()
    wire = engines.start()
    engines.answer(0, wire.sent[0], RESULT)
    assert future.result(0)
