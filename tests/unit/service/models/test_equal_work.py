"""Equal work runs once, and each request is answered as if it had run its own.

One thread makes all steps of the workers (`tests/support/stepped.py`), so each order is the same
each time.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import ArrayResult
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.fair_queue import Submission, Terms
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import BatchResult, ReuseCounts, ServedRequest
from cloze.service.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineFailed,
    Overloaded,
    ServiceError,
    ShuttingDown,
)
from cloze.service.models.adapters import AdapterBundle
from cloze.service.models.equal_work import EqualWork, KeptResults
from cloze.service.models.pipeline import Pipeline
from cloze.service.models.served_models import ServedModel
from cloze.service.tasks import TASKS, embed
from tests.support import route_service
from tests.support.encodings import encoding
from tests.support.fake_engine import FakeEngine
from tests.support.stepped import SteppedScheduler
from tests.support.task_model import bundle
from tests.support.virtual_time import VirtualClock

pytestmark = pytest.mark.anyio

A, B, C = [1, 2], [3, 4, 5], [7]
LATER = 1000.0


def of(ids: Sequence[int], **asked: Any) -> Encoding:
    return encoding(ids, **({"embed": True} | asked))


class World:
    """A scheduler that a test moves by hand, and equal work on it."""

    def __init__(self, max_bytes: int = 0, workers: int = 1) -> None:
        self.clock, self.engine = VirtualClock(), FakeEngine()
        limits = SchedulerLimits(workers, 14, 100_000, stall_timeout_s=1000.0)
        self.scheduler = SteppedScheduler(self.engine, limits, self.clock)
        self.work = EqualWork(max_bytes, self.clock)
        self.attempts = 0

    async def ask(
        self,
        *texts: Sequence[int] | Encoding,
        model: str = "m",
        deadline: float = LATER,
        **terms: Any,
    ) -> asyncio.Task[BatchResult]:
        """Return a request that has submitted its encodings."""
        batch = [text if isinstance(text, Encoding) else of(text) for text in texts]
        on = Terms(deadline, **({"client": "a"} | terms))
        task = asyncio.create_task(self.work.run(model, self.scheduler, on, batch))
        await self.settle()
        return task

    async def settle(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    async def take(self) -> None:
        """Let the workers take what waits."""
        for worker in self.scheduler.workers:
            if worker.is_free:
                self.scheduler.look(worker)
        await self.settle()

    async def run(self) -> None:
        """Run all that waits."""
        while self.scheduler._queue.tokens or any(w.batch for w in self.scheduler.workers):
            await self.take()
            for worker in self.scheduler.workers:
                if worker.batch:
                    self.scheduler.run(worker)
            await self.settle()

    @property
    def ran(self) -> list[int]:
        """The sum of the ids of each encoding that has run, which is its result."""
        return [int(one.input_ids.sum()) for batch in self.engine.batches for one in batch]

    def check_nothing_is_left(self) -> None:
        queue = self.scheduler._queue
        assert (queue.tokens, queue.lines, queue._clients) == (0, {}, {})
        assert not queue.demand._tokens
        assert not self.scheduler._activity.requests
        assert not self.work._in_flight
        assert not self.work._ended


def values(task: asyncio.Task[BatchResult]) -> list[int]:
    return [int(output["embedding"].array[0]) for output in task.result().outputs]


async def test_equal_texts_of_a_request_run_once() -> None:
    world = World()
    asked = await world.ask(A, B, A, C, A)
    assert world.scheduler.state.tokens == len(A + B + C)
    await world.run()
    assert values(asked) == [3, 12, 3, 7, 3]
    assert sorted(world.ran) == [3, 7, 12]
    assert world.work.counts() == ReuseCounts(shared=2)
    world.check_nothing_is_left()


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("cancelled", [(), (0,), (1,), (0, 1)])
async def test_who_leaves_a_run_does_not_harm_the_others(
    cancelled: Sequence[int], is_taken: bool
) -> None:
    world = World()
    asked = [await world.ask(A, B), await world.ask(B, C)]
    assert world.scheduler.state.tokens == len(A + B + C)
    if is_taken:
        await world.take()
    for index in cancelled:
        asked[index].cancel()
    await world.settle()
    if cancelled == (0, 1):
        assert world.scheduler.state.tokens == 0
    await world.run()
    for index, expected in enumerate(([3, 12], [12, 7])):
        assert asked[index].cancelled() if index in cancelled else values(asked[index]) == expected
    assert len(world.ran) == len(set(world.ran))
    world.check_nothing_is_left()


async def test_each_request_has_its_own_deadline() -> None:
    world = World()
    others = [await world.ask(C, client="b", deadline=LATER) for _ in range(2)]
    early = await world.ask(A, deadline=1.0)
    late = await world.ask(A, B, deadline=10.0)
    world.clock.now = 2.0
    await world.run()
    assert isinstance(early.exception(), DeadlineExceeded)
    assert values(late) == [3, 12]
    assert [values(each) for each in others] == [[7], [7]]
    first, second = await world.ask(A, deadline=100.0), await world.ask(A, deadline=3.0)
    second.cancel()  # as `RequestLimits` does when its time is over
    await world.run()
    assert values(first) == [3]
    world.check_nothing_is_left()


async def test_what_a_deadline_drops_is_not_refused_to_those_who_wait() -> None:
    world = World()
    submitted: list[Submission] = []
    submit = world.scheduler.submit
    world.scheduler.submit = lambda one: [submitted.append(one), submit(one)][1]  # type: ignore[method-assign]
    early = await world.ask(A, deadline=1.0)
    waiting = [await world.ask(A) for _ in range(3)]
    world.clock.now = 2.0
    await world.run()
    assert isinstance(early.exception(), DeadlineExceeded)
    assert [values(each) for each in waiting] == [[3]] * 3
    assert [one.terms.later_round for one in submitted] == [False, True]
    world.check_nothing_is_left()


async def test_a_failing_run_fails_all_who_wait_for_it() -> None:
    world = World()

    def poison(one: Encoding) -> bool:
        world.attempts += 1
        return int(one.input_ids.sum()) == 3

    world.engine.poison = poison
    asked = [await world.ask(A) for _ in range(3)]
    await world.run()
    errors = [each.exception() for each in asked]
    assert [type(error) for error in errors] == [EngineFailed] * 3
    assert len({id(error) for error in errors}) == 3
    assert world.attempts == 1
    bad, good = await world.ask(A, B), await world.ask(B)  # the error is of another text
    await world.run()
    assert isinstance(bad.exception(), EngineFailed)
    assert values(good) == [12]
    world.check_nothing_is_left()


@pytest.mark.parametrize(("end", "error"), [("close", ShuttingDown), ("_die", EngineDead)])
async def test_the_end_of_the_queue_ends_all(end: str, error: type[ServiceError]) -> None:
    world = World()
    asked = [await world.ask(A), await world.ask(A, B)]
    getattr(world.scheduler, end)(*(["it hangs"] if end == "_die" else []))
    await world.settle()
    assert [type(each.exception()) for each in asked] == [error] * 2
    world.check_nothing_is_left()


async def test_a_refusal_is_of_one_request() -> None:
    class Refusing(SteppedScheduler):
        """Refuses what comes first, a turn later, as the queues of adapters and front ends do."""

        seen: ClassVar[list[Submission]] = []

        def submit(self, submission: Submission) -> None:
            self.seen.append(submission)
            if len(self.seen) > 1:
                super().submit(submission)

    world = World()
    limits = SchedulerLimits(1, 14, 1000, stall_timeout_s=1000.0)
    world.scheduler = Refusing(world.engine, limits, world.clock)
    first, second = await world.ask(A), await world.ask(A)
    Refusing.seen[0].end(Overloaded("full", 1.5))
    await world.settle()
    await world.run()
    error = first.exception()
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.5
    assert values(second) == [3]
    assert not Refusing.seen[1].terms.later_round


APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "keys": ({"client": "key:a"}, {"client": "key:b"}),
    "models": ({"model": "m@1 x fp32"}, {"model": "m@1 x int8"}),
    "a question and a bulk request": ({}, {"is_bulk": True}),
    "patience": ({}, {"timeout_s": 2.0}),
    "rounds": ({}, {"later_round": True}),
}


@pytest.mark.parametrize("apart", APART)
async def test_unequal_requests_run_apart(apart: str) -> None:
    world = World()
    asked = [await world.ask(A, **terms) for terms in APART[apart]]
    assert world.scheduler.state.tokens + world.scheduler._queue.bulk_tokens == 4
    await world.run()
    assert world.ran == [3, 3]
    assert [values(each) for each in asked] == [[3], [3]]


async def test_unequal_encodings_run_apart() -> None:
    world = World(max_bytes=100_000)
    unequal = [
        of(A), of(A, span=True), of(A, embed=False, span=True), encoding(A, [0, 1], embed=True),
        of(A, masks=[1], top_k=2), of(A, masks=[1], top_k=3), of(A, masks=[0], top_k=3),
        of(A, masks=[0], top_k=3, targets=[9]), of([2, 1]), of([1, 2, 0]), of([1]), of([2]),
    ]  # fmt: skip
    for _ in range(2):
        await world.run()
        asked = await world.ask(*unequal)
        await world.run()
        assert values(asked) == [int(one.input_ids.sum()) for one in unequal]
        assert len(world.ran) == len(unequal)
    assert world.work.counts()[:3] == (len(unequal), len(unequal), 0)


async def test_results_are_kept_by_client_until_they_are_cleared() -> None:
    world = World(max_bytes=100_000)
    for client, runs in (("a", 1), ("a", 1), ("b", 2), ("a", 2)):
        asked = await world.ask(A, client=client)
        await world.run()
        assert len(world.ran) == runs
        result = asked.result().outputs[0]["embedding"].array
        assert result == [3]
        with suppress(ValueError):  # it is read-only
            result[0] = 99
    assert world.work.counts()[:4] == (2, 2, 0, 0)
    world.work.kept.clear()
    assert world.work.counts().bytes == 0
    await world.ask(A)
    await world.run()
    assert len(world.ran) == 3


async def test_a_large_request_is_looked_up_on_a_thread() -> None:
    world = World(max_bytes=1_000_000)
    texts = [[1, number] for number in range(700)] * 2
    for _ in range(2):
        asked = await world.ask(*texts)
        while not asked.done():
            await world.run()
            await asyncio.sleep(0.001)
        assert values(asked) == [1 + number for number in range(700)] * 2
        assert len(world.ran) == 700
    world.check_nothing_is_left()


def test_the_result_that_was_not_used_for_longest_makes_room() -> None:
    def result(size: int) -> HeadOutputs:
        batch = np.arange(10 * size, dtype=np.float32).reshape(10, size)
        return {"embedding": ArrayResult(batch[4])}  # the other rows are not kept

    kept = KeptResults(11_000)
    keys = [bytes([number]) for number in range(9)]
    for key in keys[:4]:
        kept.keep({key: result(500)})
    assert [*kept.find(keys)] == keys[:4]
    kept.find(keys[:1])
    kept.keep({keys[4]: result(500)})
    assert kept.find(keys).keys() == {keys[0], keys[2], keys[3], keys[4]}
    assert kept.evictions == 1
    kept.keep({keys[0]: result(500)})  # nothing new
    assert kept.evictions == 1
    np.testing.assert_array_equal(
        kept.find(keys[:1])[keys[0]]["embedding"].array, np.arange(2000, 2500)
    )
    kept.keep({keys[5]: result(3000)})  # does not fit at all
    assert kept.find(keys[5:]) == {}
    assert 0 <= kept.bytes <= kept.max_bytes
    nothing = KeptResults(0)
    nothing.keep({keys[0]: result(1)})
    assert nothing.bytes == 0


def test_adapters_and_their_base_run_apart(tmp_path: Path) -> None:
    base = bundle(tmp_path)
    adapters = [
        AdapterBundle(base.manifest, tmp_path, base, tmp_path, key, 1, frozenset())
        for key in ("x@1", "x@2")
    ]
    engine, work = route_service.HandEngine(), EqualWork(100_000)
    scheduler = Scheduler(engine, SchedulerLimits(1, 512, 1000, 30.0))
    scheduler.start()

    async def play() -> None:
        for _ in range(2):
            for each in (base, *adapters):
                model = ServedModel(each, scheduler, lambda: "fp32")
                pipeline = Pipeline(model, route_service.LIMITS, equal_work=work)
                await pipeline.run(embed.TASK, ["the"], embed.EmbedParameters(), ServedRequest())

    asyncio.run(asyncio.wait_for(play(), 20))
    scheduler.close()
    assert engine.runs == 3


def test_no_task_writes_into_results_that_others_share(tmp_path: Path) -> None:
    class Frozen(route_service.HandEngine):
        def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
            outputs = super().run(batch)
            for output in outputs:
                for result in output.values():
                    for name in result.__slots__:
                        getattr(result, name).flags.writeable = False
            return outputs

    asked = 0
    with route_service.Service(tmp_path) as service:
        service.engine.run = Frozen().run  # type: ignore[method-assign]
        for task in TASKS.values():
            for body in task.examples.values():
                answer = service.post(task.route, body)
                assert answer.status_code < 500, (task.name, answer.text)
                asked += answer.status_code == 200
    assert asked >= 10


@pytest.mark.parametrize("max_bytes", [0, 2_000, 1_000_000])
@pytest.mark.parametrize("seed", range(2))
async def test_any_order_answers_as_if_nothing_was_shared(seed: int, max_bytes: int) -> None:
    draw, world = random.Random(seed), World(max_bytes, workers=2)
    poison = 13
    world.engine.poison = lambda one: int(one.input_ids[0]) == poison
    asked: list[tuple[asyncio.Task[BatchResult], list[list[int]], float]] = []
    stray: set[int] = set()

    async def ask() -> None:
        first = [min(int(draw.paretovariate(0.6)), 40) for _ in range(draw.choice((1, 1, 2, 5)))]
        texts = [[each] * (1 + each % 3) for each in first]
        deadline = world.clock.now + draw.choice((1.0, 5.0, LATER))
        terms = {"client": draw.choice("ab"), "is_bulk": draw.random() < 0.1}
        asked.append((await world.ask(*texts, deadline=deadline, **terms), texts, deadline))

    async def cancel() -> None:
        stray.add(index := max(0, len(asked) - 1 - int(draw.expovariate(0.2))))
        asked[index][0].cancel()
        await world.settle()

    async def step() -> None:
        await world.take()
        for worker in world.scheduler.workers:
            if worker.batch and draw.random() < 0.6:
                world.scheduler.run(worker)
        await world.settle()

    async def wait() -> None:
        world.clock.now += draw.random() * 0.5

    steps: dict[Callable[[], Coroutine[Any, Any, None]], int] = {
        ask: 8,
        cancel: 3,
        step: 4,
        wait: 1,
    }
    await ask()
    for _ in range(1500):
        await draw.choices([*steps], [*steps.values()])[0]()
    await world.run()
    for index, (task, texts, deadline) in enumerate(asked):
        if task.cancelled():
            assert index in stray
        elif (error := task.exception()) is None:
            assert values(task) == [sum(text) for text in texts]
        elif isinstance(error, DeadlineExceeded):
            assert deadline <= world.clock.now
        else:
            is_poisoned = any(text[0] == poison for text in texts)
            assert isinstance(error, EngineFailed if is_poisoned else Overloaded)
    assert sum(task.done() and not task.cancelled() for task, *_ in asked) > 300
    assert len(world.ran) < sum(len(texts) for _, texts, _ in asked) * 0.9
    world.check_nothing_is_left()
