"""Parts of several processes of one server, each alone: restarts, errors, and the shared metrics."""

import socket
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, multiprocess
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from cloze.service.core import ExpectedWait, Overloaded, Rejection
from cloze.service.metrics import forget_other_models
from cloze.service.processes import frames
from cloze.service.processes.children import Child


@pytest.mark.parametrize(
    ("lived_s", "delay_s", "next_delay_s"), [(59.0, 8.0, 16.0), (61.0, 0.25, 0.5), (0.0, 8.0, 16.0)]
)
def test_a_long_life_ends_the_delay_of_restarts(
    tmp_path: Path, lived_s: float, delay_s: float, next_delay_s: float
) -> None:
    with socket.socket() as listener:
        child = Child("engine-0", (), (listener,), delay_s=8.0)
        now = time.monotonic()
        child.started = now - lived_s
        child.note_end(1, tmp_path)
        assert child.started == pytest.approx(now + delay_s, abs=0.2)
        assert child.delay_s == next_delay_s


@pytest.mark.parametrize("reason", Rejection)
def test_a_refusal_keeps_its_reason_between_processes(reason: Rejection) -> None:
    sent = frames.Answer(7, Overloaded("the queue is full", 3, reason), ExpectedWait(1.5, 0.5))
    received = frames.decode_answer(frames.encode_answer(sent))
    assert isinstance(received, frames.Answer)
    assert isinstance(received.outcome, Overloaded)
    assert (received.number, received.wait) == (7, ExpectedWait(1.5, 0.5))
    assert str(received.outcome) == "the queue is full"
    assert (received.outcome.retry_after_s, received.outcome.reason) == (3, reason)


def counts(folder: Path) -> dict[tuple[str, str], float]:
    """Return the values of a counter over all processes, by model and version."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(folder))
    return {
        (sample.labels["model"], sample.labels["version"]): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_an_exited_process_keeps_only_the_counts_of_models_that_are_served(tmp_path: Path) -> None:
    labels = ["model", "version"]
    models = [("bert", "1"), ("bert", "2"), ("qa", "1"), ("", "")]
    for name in ("frontend-0", "frontend-0.2"):
        file = MmapedDict(str(tmp_path / f"counter_{name}.db"))
        for number, values in enumerate(models, start=1):
            key = mmap_key("cloze_requests", "cloze_requests_total", labels, list(values), "help")
            file.write_value(key, float(number), 0.0)
        file.close()
    forget_other_models(tmp_path, "frontend-0", ["bert@2"])
    assert counts(tmp_path) == dict(zip(models, [1.0, 4.0, 3.0, 8.0], strict=True))
    forget_other_models(tmp_path, "frontend-0.2", ["bert@2"])
    assert counts(tmp_path) == {("bert", "2"): 4.0, ("", ""): 8.0}
