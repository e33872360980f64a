"""Equal work runs once, and each request is answered as if it had run its own."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloze.model_store.batch import Encoding
from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.entities import EntityRequest
from cloze.service import errors
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.fair_queue import Submission, Terms
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import BatchResult, ReuseCounts
from cloze.service.models.adapters import AdapterBundle
from cloze.service.models.equal_work import EqualWork, KeptResults
from cloze.service.models.pipeline import Pipeline
from cloze.service.models.served_models import ServedModel
from tests.support.encodings import encoding
from tests.support.fake_engine import FakeEngine
from tests.support.stepped import SteppedScheduler
from tests.support.task_model import LIMITS, bundle
from tests.support.virtual_time import VirtualClock

pytestmark = pytest.mark.anyio

A, B, C, LATER = [1, 2], [3, 4, 5], [7], 1000.0


def of(ids: Sequence[int], **asked: Any) -> Encoding:
    return encoding(ids, **({"embed": True} | asked))


def with_vectors(vectors: Any, ids: Sequence[int] = A) -> Encoding:
    request = {"entities": EntityRequest([1], (), vectors)}
    return Encoding(of(ids).input_ids, of(ids).token_type_ids, request)


class World:
    """A scheduler that a test moves by hand, and equal work on it."""

    def __init__(self, max_bytes: int = 0, workers: int = 1) -> None:
        self.clock, self.engine = VirtualClock(), FakeEngine()
        limits = SchedulerLimits(workers, 14, 100_000, stall_timeout_s=1000.0)
        self.scheduler = SteppedScheduler(self.engine, limits, self.clock)
        self.work = EqualWork(max_bytes, self.clock)

    async def ask(
        self, *texts: Sequence[int] | Encoding, model: str = "m", **terms: Any
    ) -> asyncio.Task[BatchResult]:
        """Return a request that has submitted its encodings."""
        batch = [text if isinstance(text, Encoding) else of(text) for text in texts]
        on = Terms(**({"deadline": LATER, "client": "a"} | terms))
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
        assert not self.work._run_of


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
    await world.run()
    for index, expected in enumerate(([3, 12], [12, 7])):
        assert asked[index].cancelled() if index in cancelled else values(asked[index]) == expected
    assert len(world.ran) == len(set(world.ran))
    world.check_nothing_is_left()


async def test_each_request_has_its_own_deadline() -> None:
    world = World()
    submitted, submit = list[Submission](), world.scheduler.submit
    world.scheduler.submit = lambda one: [submitted.append(one), submit(one)][1]  # type: ignore[method-assign]
    early = await world.ask(A, deadline=1.0)
    late = [await world.ask(A, deadline=10.0) for _ in range(3)]
    world.clock.now = 2.0
    await world.run()
    assert isinstance(early.exception(), errors.DeadlineExceeded)
    assert [values(each) for each in late] == [[3]] * 3
    assert [one.terms.later_round for one in submitted] == [False, True]
    world.check_nothing_is_left()


async def test_a_failing_run_fails_all_who_wait_for_it() -> None:
    world, attempts = World(), list[int]()
    world.engine.poison = lambda one: attempts.append(int(one.input_ids.sum())) or attempts[-1] == 3
    asked = [await world.ask(A) for _ in range(3)]
    await world.run()
    failed = [each.exception() for each in asked]
    assert [type(error) for error in failed] == [errors.EngineFailed] * 3
    assert len({id(error) for error in failed}) == 3
    assert attempts == [3]
    bad, good = await world.ask(A, B), await world.ask(B)  # the error is of another text
    await world.run()
    assert isinstance(bad.exception(), errors.EngineFailed)
    assert values(good) == [12]
    world.check_nothing_is_left()


@pytest.mark.parametrize(("end", "error"), [("close", errors.ShuttingDown), ("_die", errors.EngineDead)])  # fmt: skip
async def test_the_end_of_the_queue_ends_all(end: str, error: type[errors.ServiceError]) -> None:
    world = World()
    asked = [await world.ask(A), await world.ask(A, B)]
    getattr(world.scheduler, end)(*(["it hangs"] if end == "_die" else []))
    await world.settle()
    assert [type(each.exception()) for each in asked] == [error] * 2
    world.check_nothing_is_left()


async def test_a_refusal_is_of_one_request() -> None:
    """The queues of adapters and of front ends refuse by the submission."""
    world, seen = World(), list[Submission]()
    world.scheduler.submit = seen.append  # type: ignore[method-assign, assignment]
    first, second = await world.ask(A), await world.ask(A)
    seen[0].end(errors.Overloaded("full", 1.5))
    await world.settle()
    seen[1].end(BatchResult([{"embedding": ArrayResult(np.ones(1, np.float32))}], 0.0, 0.0))
    await world.settle()
    assert first.exception() is seen[0].exception()
    assert (values(second), seen[1].terms.later_round) == ([1], False)


@pytest.mark.parametrize(
    "apart", [{"client": "key:b"}, {"model": "other"}, {"is_bulk": True}, {"timeout_s": 2.0}, {"later_round": True}]
)  # fmt: skip
async def test_unequal_requests_run_apart(apart: dict[str, Any]) -> None:
    world = World()
    asked = [await world.ask(A), await world.ask(A, **apart)]
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


async def test_results_are_kept_by_client() -> None:
    world = World(max_bytes=100_000)
    for client, runs in (("a", 1), ("a", 1), ("b", 2), ("a", 2)):
        asked = await world.ask(A, client=client)
        await world.run()
        assert len(world.ran) == runs
        assert values(asked) == [3]
    assert world.work.counts()[:4] == (2, 2, 0, 0)


async def test_a_large_request_is_looked_up_on_a_thread() -> None:
    world = World(max_bytes=1_000_000)
    for _ in range(2):
        asked = await world.ask(*[[1, number % 700] for number in range(1400)])
        while not asked.done():
            await world.run()
            await asyncio.sleep(0.001)
        assert values(asked) == [1 + number % 700 for number in range(1400)]
        assert len(world.ran) == 700


def test_the_result_that_was_not_used_for_longest_makes_room() -> None:
    batch = np.arange(5000, dtype=np.float32).reshape(10, 500)  # 2,600 bytes per row with the rest
    result, kept = {"embedding": ArrayResult(batch[4])}, KeptResults(11_000)
    a, b, c, d, e, f = keys = [bytes([number]) for number in range(6)]
    for key in keys[:4]:
        kept.keep({key: result})
    assert [*kept.find([d, c, b, a])] == [d, c, b, a]
    kept.keep({d: result, e: result})  # d is there
    kept.keep({f: {"embedding": ArrayResult(batch)}})  # too large
    assert kept.find(keys).keys() == {a, b, c, e}
    assert (kept.evictions, kept.bytes) == (1, 4 * 2600)
    found = kept.find([a])[a]["embedding"].array
    np.testing.assert_array_equal(found, batch[4])
    assert (found.base, found.flags.writeable) == (None, False)  # it does not hold its batch


def test_adapters_and_their_base_run_apart(tmp_path: Path) -> None:
    base = bundle(tmp_path)
    rest = base.manifest, tmp_path, base, tmp_path
    adapters = [AdapterBundle(*rest, key, 1, frozenset()) for key in ("x@1", "x@2")]
    queue = Scheduler(FakeEngine(), SchedulerLimits(1, 512, 1000, 30.0))
    models = [ServedModel(each, queue, lambda: "fp32") for each in (base, *adapters)]
    assert len({Pipeline(model, LIMITS)._fingerprint for model in models}) == 3


@pytest.mark.parametrize("max_bytes", [0, 2_000, 1_000_000])
@pytest.mark.parametrize("seed", range(2))
async def test_any_order_answers_as_if_nothing_was_shared(seed: int, max_bytes: int) -> None:
    draw, world, poison = random.Random(seed), World(max_bytes, workers=2), 13
    world.engine.poison = lambda one: int(one.input_ids[0]) == poison
    asked: list[tuple[asyncio.Task[BatchResult], list[list[int]], float]] = []
    cancelled: set[asyncio.Task[BatchResult]] = set()
    for _ in range(1500):
        step = draw.choices(("ask", "cancel", "work", "wait"), (8, 3, 4, 1))[0]
        if step == "ask" or not asked:
            first = [min(int(draw.paretovariate(0.6)), 40) for _ in range(draw.choice((1, 2, 5)))]
            texts = [[each] * (1 + each % 3) for each in first]
            deadline = world.clock.now + draw.choice((1.0, 5.0, LATER))
            client, is_bulk = draw.choice("ab"), draw.random() < 0.1
            task = await world.ask(*texts, deadline=deadline, client=client, is_bulk=is_bulk)
            asked.append((task, texts, deadline))
        elif step == "cancel":
            task = asked[max(0, len(asked) - 1 - int(draw.expovariate(0.2)))][0]
            task.cancel()
            cancelled.add(task)
        elif step == "work":
            await world.take()
            for worker in world.scheduler.workers:
                if worker.batch and draw.random() < 0.6:
                    world.scheduler.run(worker)
        else:
            world.clock.now += draw.random() * 0.5
        await world.settle()
    await world.run()
    for task, texts, deadline in asked:
        if task.cancelled():
            assert task in cancelled
        elif (error := task.exception()) is None:
            assert values(task) == [sum(text) for text in texts]
        elif isinstance(error, errors.DeadlineExceeded):
            assert deadline <= world.clock.now
        else:
            is_poisoned = any(text[0] == poison for text in texts)
            assert isinstance(error, errors.EngineFailed if is_poisoned else errors.Overloaded)
    assert sum(not task.cancelled() and task.exception() is None for task, *_ in asked) > 200
    assert len(world.ran) < 0.9 * sum(len(texts) for _, texts, _ in asked)
    world.check_nothing_is_left()


async def test_vectors_in_a_request_count_whole() -> None:
    """Arrays of many numbers are shortened where Python shows them."""
    vectors = np.random.default_rng(0).random((25, 512), np.float32)
    other = vectors.copy()
    other[12, 256] += 1
    world = World()
    asked = await world.ask(*map(with_vectors, (vectors, other, vectors.copy())))
    assert world.scheduler._queue.tokens == 2 * len(A)
    asked.cancel()


class Counted(np.ndarray[Any, np.dtype[np.float32]]):
    """Vectors that count how often they are read."""

    reads = 0

    def tobytes(self, order: Any = "C") -> bytes:
        Counted.reads += 1
        return super().tobytes(order)


async def test_vectors_that_texts_share_are_read_once() -> None:
    """A request may have 2,048 texts, and 1,000 labels with 2 KB of numbers each."""
    vectors = np.ones((25, 512), np.float32).view(Counted)
    asked = await World().ask(*(with_vectors(vectors, ids) for ids in (A, B, C)))
    assert Counted.reads == 1
    asked.cancel()
