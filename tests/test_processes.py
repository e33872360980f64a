"""Parts of several processes of one server, each alone: restarts and errors."""

import socket
import time
from pathlib import Path

import pytest

from cloze.service.core import ExpectedWait, Overloaded, Rejection
from cloze.service.processes import frames
from cloze.service.processes.children import Child


@pytest.mark.parametrize(
    ("lived_s", "delay_s", "next_delay_s"), [(59.0, 8.0, 16.0), (61.0, 0.25, 0.5), (0.0, 8.0, 16.0)]
)
def test_a_long_life_ends_the_delay_of_restarts(
    tmp_path: Path, lived_s: float, delay_s: float, next_delay_s: float
) -> None:
    with socket.socket() as listener:
        child = Child("engine-0", (), listener, delay_s=8.0)
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
