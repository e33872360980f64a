"""Errors between the processes of one server."""

import pytest

from cloze.service.batching.fair_queue import ExpectedWait
from cloze.service.errors import Overloaded, Rejection
from cloze.service.processes import frames


@pytest.mark.parametrize("reason", Rejection)
def test_a_refusal_keeps_its_reason_between_processes(reason: Rejection) -> None:
    sent = frames.Answer(7, Overloaded("the queue is full", 3, reason), ExpectedWait(1.5, 0.5))
    received = frames.decode_answer(frames.encode_answer(sent))
    assert isinstance(received, frames.Answer)
    assert isinstance(received.outcome, Overloaded)
    assert (received.number, received.wait) == (7, ExpectedWait(1.5, 0.5))
    assert str(received.outcome) == "the queue is full"
    assert (received.outcome.retry_after_s, received.outcome.reason) == (3, reason)
