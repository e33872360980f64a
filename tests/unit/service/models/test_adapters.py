"""Adapters as served models: the queue of their base, and what their manifests say."""

import math
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloze.model_store import Bundle
from cloze.model_store.adapter import Adapter, Head
from cloze.model_store.adapter_section import AdapterHead
from cloze.model_store.embedding_space import embedding_space, own_recipe
from cloze.model_store.manifest import Manifest
from cloze.model_store.peft import AdapterError
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.fair_queue import LineKey, QueueState
from cloze.service.batching.scheduler import Scheduler
from cloze.service.errors import AdapterUnavailable, EngineDead
from cloze.service.models import adapters
from cloze.service.models.adapters import AdapterBundle, AdapterQueue
from tests.support.encodings import encoding, submit
from tests.support.fake_engine import FakeEngine, running
from tests.support.task_model import bundle
from tests.support.waiting import wait_until

HIDDEN = 4
LIMITS = SchedulerLimits(workers=1, max_batch_tokens=20, max_queue_tokens=100, stall_timeout_s=8.0)


def adapter(digest: str, head: Head | None = None, **settings: Any) -> Adapter:
    return Adapter(0, {}, head, settings, None, digest)


def classifier(labels: int, name: str = "sequence_classification") -> Head:
    weights = {"classifier.weight": np.zeros((labels, HIDDEN), np.float32)}
    return Head(name, weights, AdapterHead.model_construct(activation="tanh"))


def made(base: Bundle, read: Adapter, name: str = "stars") -> AdapterBundle:
    return adapters._of_base(name, Path(name), frozenset(), base, read)


class Registry:
    """Adapters of an engine whose disk a test controls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.disk: Future[None] = Future()

    def add(self, key: str, read: object) -> None:
        raise NotImplementedError

    def forget(self, key: str) -> None:
        self.calls.append(f"forget {key}")

    def hold(self, key: str) -> Future[None]:
        self.calls.append(f"hold {key}")
        return self.disk

    def release(self, key: str) -> None:
        self.calls.append(f"release {key}")


def test_an_adapter_waits_in_the_queue_of_its_base() -> None:
    base, registry = Scheduler(FakeEngine(), LIMITS), Registry()
    registry.disk.set_result(None)
    queue = AdapterQueue(base, "stars@1", registry)
    one = encoding([1, 2, 3], embed=True)
    submit(queue, [one], math.inf, client="a")
    assert (one.adapter, base.state.tokens) == ("stars@1", 3)
    assert queue.state == QueueState(0, 0.0), "the base counts what waits"

    base._admission.batch_ended(0.0, 1000, 1.0, is_bulk=False)
    for is_bulk in (False, True):
        asked = ("a", LineKey(0, 0, is_bulk), 5, 7)
        assert queue.expected_wait(*asked) == base.expected_wait(*asked)
    assert queue.expected_wait("a", LineKey(0, 0), 5, 7).seconds > 0

    queue.close()
    assert registry.calls == ["hold stars@1", "forget stars@1"]
    assert queue.dead_reason is None, "the base goes on"
    base._die("a run hangs")
    assert queue.dead_reason == "a run hangs"


def test_a_slow_disk_stops_neither_the_engine_nor_other_requests() -> None:
    """The run of a request that waits for the disk is not watched, because it has not begun."""
    registry = Registry()
    with running(FakeEngine(), replace(LIMITS, stall_timeout_s=0.02)) as base:
        queue = AdapterQueue(base, "stars@1", registry)
        cold = submit(queue, [encoding([1, 2], embed=True)], math.inf)
        gone = submit(queue, [encoding([5, 6], embed=True)], math.inf)
        for _ in range(20):
            submit(base, [encoding([3, 4], embed=True)], math.inf).result(20)
        begin = time.monotonic()
        wait_until(lambda: time.monotonic() > begin + 0.1)
        assert (cold.done(), base.dead_reason) == (False, None)
        gone.cancel()
        registry.disk.set_result(None)
        assert cold.result(20).outputs[0]["embedding"].array[0] == 3
        wait_until(lambda: registry.calls[2:] == ["release stars@1"] * 2)
        assert base.state.tokens == 0


def test_a_request_ends_with_the_error_of_its_adapter_or_of_the_queue() -> None:
    base, registry = Scheduler(FakeEngine(), LIMITS), Registry()
    registry.disk.set_exception(AdapterUnavailable("the adapter stars was removed"))
    queue = AdapterQueue(base, "stars@1", registry)
    refused = submit(queue, [encoding([1], embed=True)], math.inf)
    assert type(refused.exception(0)) is AdapterUnavailable
    assert registry.calls == ["hold stars@1"], "nothing is held, and nothing released"
    registry.disk = Future()
    registry.disk.set_result(None)
    base._die("a run hangs")
    refused = submit(queue, [encoding([1], embed=True)], math.inf)
    assert type(refused.exception(0)) is EngineDead
    assert registry.calls[1:] == ["hold stars@1", "release stars@1"]


def space(manifest: Manifest) -> str | None:
    recipe = own_recipe(manifest)
    return embedding_space(manifest, "fp32", recipe)


def test_vectors_of_an_adapter_are_in_a_space_of_their_own(tmp_path: Path) -> None:
    base = bundle(tmp_path)
    one, other, same = (
        made(base, adapter(digest), name)
        for digest, name in (("1" * 64, "one"), ("2" * 64, "other"), ("1" * 64, "same"))
    )
    assert len({space(each.manifest) for each in (base, one, other)}) == 3
    assert space(one.manifest) == space(same.manifest), "a name moves no vector"
    assert one.key != other.key
    assert one.manifest.tasks == base.manifest.tasks


def test_an_adapter_with_a_head_has_the_task_of_its_head_alone(tmp_path: Path) -> None:
    manifest = made(bundle(tmp_path), adapter("1", classifier(2))).manifest
    assert (manifest.tasks, manifest.embedding) == (("text-classification",), None)
    assert list(manifest.heads) == ["sequence_classification"]


def test_labels_are_as_many_as_rows_and_without_names_those_of_transformers() -> None:
    for rows, kind in ((1, "multi_label_classification"), (2, "single_label_classification")):
        options = adapters._labels(classifier(rows), HIDDEN, {})[1].model_dump()
        assert options["labels"] == tuple(f"LABEL_{n}" for n in range(rows))
        assert options["problem_type"] == kind
    names = {"id2label": {"0": "bad", "1": "good", "2": "best"}}
    adapters._labels(classifier(10_000), HIDDEN, {})
    for rows, given in ((2, names), (4, names), (10_001, {})):
        with pytest.raises(AdapterError):
            adapters._labels(classifier(rows), HIDDEN, given)
