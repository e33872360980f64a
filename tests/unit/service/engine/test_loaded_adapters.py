"""The tables of loaded adapters: room for parallel batches, and adapters that go while in use."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cloze.model_store.adapter import Adapter
from cloze.model_store.adapter_section import AdaptedLayer, AdapterSupport
from cloze.model_store.peft import LowRank
from cloze.service.core import AdapterUnavailable, StartupError
from cloze.service.engine.adapters import LoadedAdapters

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


def test_parallel_batches_wait_for_room_instead_of_failing() -> None:
    loaded = loaded_adapters(4, room=2)
    barrier = threading.Barrier(4)

    def run(number: int) -> None:
        barrier.wait(10)
        for turn in range(50):
            keys = [str(1 + (number + turn) % 4), str(1 + (number + turn + 1) % 4), ""]
            with loaded.using(keys) as adapters:
                for key, one in zip(keys, adapters, strict=True):
                    if one is not None:
                        rows = loaded.tables[WIDTH][one.rows]
                        assert np.array_equal(rows, np.full_like(rows, float(key)))
                assert loaded.size <= 2 * SIZE
                assert not loaded.tables[WIDTH][0].any(), "lower ranks are filled with row 0"

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(run, number) for number in range(4)]:
            future.result(timeout=60)


def test_a_batch_that_never_fits_fails_although_others_run() -> None:
    loaded = loaded_adapters(3, room=2)
    is_used, may_end = threading.Event(), threading.Event()

    def use() -> None:
        with loaded.using(["1"]):
            is_used.set()
            assert may_end.wait(10)

    def need_three() -> None:
        with pytest.raises(ValueError, match="more than the limit"), loaded.using(["1", "2", "3"]):
            pass

    with ThreadPoolExecutor(2) as threads:
        used = threads.submit(use)
        assert is_used.wait(10)
        failing = threads.submit(need_three)
        may_end.set()
        used.result(timeout=10)
        failing.result(timeout=10)
    with loaded.using(["2", "3"]):
        assert loaded.size == 2 * SIZE


def test_an_adapter_that_is_forgotten_in_use_is_freed_afterwards() -> None:
    loaded = loaded_adapters(2, room=2)
    with loaded.using(["1"]) as (one,):
        loaded.forget("1")
        assert one is not None
        assert loaded.tables[WIDTH][one.rows].max() == 1.0
        assert loaded.keys == ["1"]
    assert loaded.keys == []
    with pytest.raises(AdapterUnavailable, match="was removed"), loaded.using(["1"]):
        pass


def test_an_adapter_that_is_forgotten_stays_until_its_last_batch_has_run() -> None:
    """Another adapter would get its rows, and a batch in progress the results of that one."""
    loaded = loaded_adapters(2, room=2)
    with loaded.using(["1"]):
        with loaded.using(["1"]):
            loaded.forget("1")
        assert loaded.keys == ["1"]
    assert loaded.keys == []


def test_why_an_adapter_cannot_be_read_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    loaded = loaded_adapters(1, room=2)

    def fail() -> Adapter:
        raise ValueError("adapter_model.safetensors cannot be read")

    loaded.add("gone", fail)
    with caplog.at_level(logging.ERROR, "cloze"):
        for _ in range(2):
            with pytest.raises(AdapterUnavailable, match="gone"), loaded.using(["1", "gone"]):
                pass
    assert "the adapter gone: adapter_model.safetensors cannot be read" in caplog.text
    loaded.forget("1")
    assert loaded.size == 0, "a failed batch holds nothing"


def test_the_longest_unused_one_makes_room_and_no_other() -> None:
    loaded = loaded_adapters(4, room=2)
    kept = []
    for keys in (["1"], ["2"], ["1"], ["3"], ["4", "3"]):
        with loaded.using(keys):
            pass
        kept.append(loaded.keys)
    assert kept == [["1"], ["1", "2"], ["2", "1"], ["1", "3"], ["4", "3"]]


def test_a_base_that_cannot_be_read_any_more_fails_its_adapter_alone() -> None:
    loaded = loaded_adapters(1, room=2)

    def fail() -> Adapter:
        raise StartupError("bundle tiny@1: adapter-heads.safetensors cannot be read")

    loaded.add("stars@1", fail)
    with pytest.raises(AdapterUnavailable, match="stars have changed"), loaded.using(["stars@1"]):
        pass
