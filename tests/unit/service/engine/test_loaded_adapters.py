"""The tables of loaded adapters: room for parallel batches, and adapters that go while in use."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from cloze.model_store.adapter import Adapter
from cloze.model_store.adapter_section import AdaptedLayer, AdapterSupport
from cloze.model_store.peft import LowRank
from cloze.service.engine.adapters import LoadedAdapters
from tests.support.refusals import refused
from tests.support.waiting import wait_until

WIDTH, RANK = 8, 4
SIZE = 2 * RANK * WIDTH * 4


def adapter(value: float) -> Adapter:
    matrix = np.full((RANK, WIDTH), value, np.float32)
    return Adapter(RANK, {0: LowRank(matrix, matrix.copy())}, None, {}, None, "")


def loaded_adapters(adapters: int, room: int) -> LoadedAdapters:
    """Return adapters "1", "2" and so on, of which a number has room at once."""
    layer = AdaptedLayer(numbers=(0,), inputs=WIDTH, outputs=WIDTH)
    loaded = LoadedAdapters(AdapterSupport.model_construct(layers={"query": layer}), room * SIZE)
    for number in range(1, adapters + 1):
        loaded.add(str(number), lambda number=number: adapter(number))
    return loaded


@contextmanager
def holding(loaded: LoadedAdapters, *keys: str) -> Iterator[None]:
    """Hold adapters, as requests do from before they are submitted until their end."""
    for key in keys:
        loaded.hold(key).result(20)
    yield
    for key in keys:
        loaded.release(key)


def values(loaded: LoadedAdapters, *keys: str) -> list[float | None]:
    """The numbers of adapters, as a batch finds them."""
    with loaded.using(keys) as adapters:
        tables = [one and np.unique(loaded.tables[WIDTH][one.rows]) for one in adapters]
        assert not loaded.tables[WIDTH][0].any(), "lower ranks are filled with row 0"
    return [None if table is None else float(*table) for table in tables]


def test_requests_in_parallel_wait_for_room_instead_of_failing() -> None:
    loaded = loaded_adapters(4, room=2)
    barrier = threading.Barrier(4)

    def run(number: int) -> None:
        barrier.wait(10)
        for turn in range(50):
            key = str(1 + (number + turn) % 4)
            with holding(loaded, key):
                assert values(loaded, key, "") == [float(key), None]
                assert loaded.size <= 2 * SIZE

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(run, number) for number in range(4)]:
            future.result(timeout=60)


def test_who_comes_later_waits_behind_who_waits_for_room() -> None:
    """Otherwise the adapters that are always in use would leave no room to others for ever."""
    loaded = loaded_adapters(3, room=2)
    for key in ("1", "2"):
        loaded.hold(key).result(10)
    third = loaded.hold("3")
    wait_until(lambda: loaded._waits_for_room)
    again = loaded.hold("1")
    assert [third.done(), again.done()] == [False, False]
    loaded.release("2")
    for held in (third, again):
        held.result(10)
    assert values(loaded, "3", "1") == [3.0, 1.0]


def test_nobody_waits_for_a_slow_disk_but_who_needs_what_it_has() -> None:
    loaded, reads = loaded_adapters(1, room=3), []
    reading, may_end = threading.Event(), threading.Event()

    def read() -> Adapter:
        reads.append(1)
        reading.set()
        assert may_end.wait(20)
        return adapter(7)

    loaded.add("slow", read)
    loaded.hold("1").result(10)
    first, second = loaded.hold("slow"), loaded.hold("slow")
    assert reading.wait(10)
    loaded.hold("1").result(0)
    assert values(loaded, "1") == [1.0]
    assert [first.done(), second.done()] == [False, False]
    may_end.set()
    first.result(10)
    second.result(10)
    assert len(reads) == 1
    assert values(loaded, "slow") == [7.0]


def test_an_adapter_that_is_forgotten_in_use_is_freed_afterwards() -> None:
    loaded = loaded_adapters(2, room=2)
    with holding(loaded, "1"):
        loaded.forget("1")
        assert values(loaded, "1") == [1.0]
        assert loaded.keys == ["1"]
    assert loaded.keys == []
    with refused("adapter_unavailable"):
        loaded.hold("1").result(10)
    with refused("adapter_unavailable"), loaded.using(["2", "1"]):
        pass
    loaded = loaded_adapters(2, room=2)
    loaded.hold("1").result(10)
    with loaded.using(["1"]):
        loaded.release("1")  # its request was cancelled, but its batch runs
        loaded.forget("1")
        assert loaded.keys == ["1"], "another adapter would get its rows"
    assert loaded.keys == []


def test_the_longest_unused_one_makes_room_and_no_other() -> None:
    loaded = loaded_adapters(4, room=2)
    kept = []
    for keys in (["1"], ["2"], ["1"], ["3"], ["4", "3"]):
        with holding(loaded, *keys):
            pass
        kept.append(loaded.keys)
    assert kept == [["1"], ["1", "2"], ["2", "1"], ["1", "3"], ["4", "3"]]
