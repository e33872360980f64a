"""Threads that run graphs at the same time are kept off each other's CPU, and then freed."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cloze.service.engine.cpu_places import Affinity, ThreadSpread, thread_ids
from cloze.service.engine.session import cpu_session, temporary_folder

HELPER = 999_999


class FakeAffinity(Affinity):
    """Records the calls, as of a machine on which every thread is where the test put it."""

    def __init__(self) -> None:
        self.cpus = {0, 1, 2}
        self.places: dict[int, int] = {}
        self.calls: list[tuple[int, set[int]]] = []
        self.error: type[OSError] | None = None

    def current_cpu(self) -> int:
        return self.places.get(threading.get_native_id(), 0)

    def allowed(self) -> set[int]:
        return set(self.cpus)

    def allow(self, thread: int, cpus: set[int]) -> None:
        self.calls.append((thread, cpus))
        if self.error is not None:
            raise self.error

    def new_calls(self) -> list[tuple[int, set[int]]]:
        calls, self.calls = self.calls, []
        return calls


class Caller:
    """A thread that runs graphs."""

    def __init__(self, spread: ThreadSpread) -> None:
        self._spread = spread
        self._run: AbstractContextManager[None]
        self.executor = ThreadPoolExecutor(1)
        self.id = self.executor.submit(threading.get_native_id).result()

    def begin(self, *helpers: int) -> None:
        self._run = self._spread.run(helpers)
        self.executor.submit(self._run.__enter__).result()

    def end(self) -> None:
        self.executor.submit(self._run.__exit__, None, None, None).result()

    def run(self) -> None:
        self.begin()
        self.end()


@pytest.fixture
def affinity() -> FakeAffinity:
    return FakeAffinity()


@pytest.fixture
def callers(affinity: FakeAffinity) -> Iterator[tuple[Caller, Caller]]:
    spread = ThreadSpread(affinity)
    callers = Caller(spread), Caller(spread)
    yield callers
    for caller in callers:
        caller.executor.shutdown()


Callers = tuple[Caller, Caller]


def test_the_runtimes_threads_are_kept_off_the_cpu_of_the_caller(
    affinity: FakeAffinity, callers: Callers
) -> None:
    caller, _ = callers
    for cpu, expected in ((0, [(HELPER, {1, 2})]), (0, []), (2, [(HELPER, {0, 1})])):
        affinity.places[caller.id] = cpu
        caller.begin(HELPER)
        caller.end()
        assert affinity.new_calls() == expected


def test_a_thread_on_its_way_to_a_run_is_kept_off_running_ones_and_then_freed(
    affinity: FakeAffinity, callers: Callers
) -> None:
    first, second = callers
    second.run()
    first.begin()
    assert affinity.new_calls() == [(second.id, {1, 2})]
    affinity.places[second.id] = 1
    second.begin()
    assert affinity.new_calls() == [(second.id, {0, 1, 2})]
    second.end()
    first.end()
    first.run()
    assert affinity.new_calls() == [(second.id, {1, 2}), (second.id, {0, 1, 2})]


def test_after_the_system_forbids_a_call_there_is_no_other(
    affinity: FakeAffinity, callers: Callers
) -> None:
    affinity.error = PermissionError
    for _ in range(2):
        callers[0].begin(HELPER, HELPER + 1)
        callers[0].end()
    assert len(affinity.calls) == 1


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="the system has no affinity, or one CPU",
)
def test_after_real_runs_every_thread_may_run_everywhere_but_the_runtimes(tmp_path: Path) -> None:
    if temporary_folder() is None:
        pytest.skip("every folder for temporary files is in memory")
    weight = onnx.numpy_helper.from_array(np.eye(512, dtype=np.float32), "w")
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", 512]) for name in ("x", "y")
    ]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    body = helper.make_graph([node], "g", ends[:1], ends[1:], [weight])
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save_model(model, str(tmp_path / "graph.onnx"))

    allowed = os.sched_getaffinity(os.getpid())
    before = thread_ids()
    session = cpu_session(tmp_path / "graph.onnx", 1, 2)
    (runtime_thread,) = thread_ids() - before
    feeds = {"x": np.ones((64, 512), np.float32)}

    session.run(["y"], feeds)
    both_ended = threading.Barrier(2)

    def run() -> set[int]:
        for _ in range(100):
            session.run(["y"], feeds)
            session.alone.run(["y"], feeds)
        both_ended.wait(30)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(2) as executor:
        # The first thread ran a graph too, and is where the allowed CPUs are read.
        free = [each.result() for each in [executor.submit(run) for _ in range(2)]]
    assert [*free, os.sched_getaffinity(0)] == [allowed] * 3
    assert len(os.sched_getaffinity(runtime_thread)) == len(allowed) - 1
