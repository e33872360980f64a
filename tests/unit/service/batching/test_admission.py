"""Admission: expected waits, and the reasons for which a request is refused."""

from typing import Any

import pytest

from cloze.service.batching.admission import (
    Activity,
    Admission,
    DrainRate,
    SchedulerLimits,
    WaitLimits,
)
from cloze.service.batching.fair_queue import ExpectedWait, FairQueue, LineKey, Submission, Terms
from cloze.service.errors import Overloaded, Rejection
from tests.support.encodings import encoding

INFINITY = float("inf")

NOW = 1000.0
NO_LIMIT = WaitLimits()


def submission(tokens: int, deadline: float, client: str, **terms: Any) -> Submission:
    """Return a request of one text, as the scheduler gets it."""
    made = Submission(Terms(deadline, client, **terms), [encoding([1] * tokens)])
    made.submitted = NOW
    made.due = INFINITY if made.terms.is_bulk else NOW + 0.9 * (deadline - NOW)
    return made


class Full:
    """A queue with its admission; the rate is 10 tokens per second."""

    def __init__(
        self, *, max_tokens: int = 10_000, waits: WaitLimits = NO_LIMIT, workers: int = 2
    ) -> None:
        self.queue = FairQueue(varlen=False)
        self.activity = Activity()
        self.activity.busy = 1
        limits = SchedulerLimits(workers, 1000, max_tokens, 8.0, waits=waits)
        self.admission = Admission(self.queue, self.activity, limits)
        self.admission.tokens_per_s = 10.0 / workers
        self.now = NOW

    def ended(self, tokens: int, per_s: float, after_s: float = 0.0) -> None:
        """Note the end of a batch, some seconds after the last one."""
        self.now += after_s
        self.admission.batch_ended(self.now, tokens, tokens / per_s, is_bulk=False)

    def wait(
        self,
        client: str,
        tokens: int,
        timeout_s: float | None,
        unsubmitted: int = 0,
        is_bulk: bool = False,
    ) -> ExpectedWait:
        line = LineKey.of(tokens, timeout_s, is_bulk=is_bulk)
        wait = self.admission.expected_wait(client, line, tokens, unsubmitted)
        return wait._replace(ahead=0, per_request_s=round(wait.per_request_s, 2))

    def put(
        self,
        tokens: int,
        client: str = "a",
        timeout_s: float | None = None,
        deadline: float = INFINITY,
    ) -> None:
        self.queue.add(submission(tokens, deadline, client, timeout_s=timeout_s))

    def refusal(
        self,
        tokens: int,
        left_s: float,
        client: str = "a",
        timeout_s: float | None = None,
        **options: Any,
    ) -> Overloaded | None:
        try:
            request = submission(tokens, NOW + left_s, client, timeout_s=timeout_s, **options)
            self.admission.check(request, NOW)
        except Overloaded as error:
            return error
        return None

    def refused(self, *asked: Any, **options: Any) -> Overloaded:
        error = self.refusal(*asked, **options)
        assert error is not None
        return error


def test_bulk_requests_have_a_tenth_of_the_rate_beside_others_and_else_all() -> None:
    full, alone = Full(), Full()
    full.put(90)
    assert full.wait("a", 10, None).seconds == pytest.approx(9)
    for queue in (full.queue, alone.queue):
        queue.add(submission(50, INFINITY, "b", is_bulk=True))
    assert full.wait("a", 10, None).seconds == pytest.approx(90 / 9)
    assert full.wait("b", 10, None, 0, True).seconds == pytest.approx(50)
    assert alone.wait("b", 10, None, 0, True).seconds == pytest.approx(5)


def test_the_rate_is_a_mean_of_batches_times_the_workers() -> None:
    full = Full(workers=3)
    full.admission.tokens_per_s = 0.0
    assert full.admission.rate == 0
    full.ended(10, 100.0)
    assert full.admission.tokens_per_s == pytest.approx(100)
    full.ended(10, 200.0)
    assert full.admission.tokens_per_s == pytest.approx(150)
    for _ in range(8):
        full.ended(10, 150.0)
    full.ended(10, 250.0)
    assert full.admission.tokens_per_s == pytest.approx(160)
    assert full.admission.rate == pytest.approx(480)
    lone = Full(workers=3)
    for per_s, alone, rate in ((120, True, 360), (50, False, 150), (60, True, 150 * 90 / 120)):
        lone.admission.batch_ended(NOW, per_s, 1.0, is_bulk=False, alone=alone)
        assert lone.admission.rate == pytest.approx(rate), "a lone batch may have more cores"


def test_a_queue_that_drains_slowly_has_that_rate() -> None:
    full = Full(workers=2)
    full.put(66)
    full.ended(10, 100.0)
    full.admission.tokens_per_s = 100.0
    for _ in range(7):
        full.ended(10, 100.0, after_s=0.125)
    assert full.admission.rate == 200, "two workers end few batches"
    full.ended(10, 100.0, after_s=0.125)
    assert full.admission.rate == 80
    full.admission.tokens_per_s = 300.0
    assert full.admission.rate == 120, "at least a fifth of the rate of batches"


def test_a_rate_is_measured_while_others_wait() -> None:
    rate = DrainRate()
    rate.count(0.0, 999, waiting=True)  # began before the window
    rate.count(0.1, 100, waiting=True)
    assert rate.per_s == 0, "the window is too short"
    rate.count(0.25, 100, waiting=True)
    assert rate.per_s == 800
    rate.count(0.75, 50, waiting=True)
    assert rate.per_s == pytest.approx(800 + 0.3 * (100 - 800))


def test_a_model_that_begins_to_work_slows_the_others_at_once() -> None:
    full = Full(workers=1)
    full.put(100)
    full.activity.busy = 2
    full.ended(10, 10.0)
    full.ended(1000, 10.0, after_s=0.5)
    assert full.admission.rate == 2000, "measured while others waited"
    full.activity.busy = 5
    assert full.admission.rate == 800
    full.activity.busy = 1
    assert full.admission.rate == 2000, "the others may have had cores of their own"
    full.activity.busy = 0
    assert full.admission.rate == 2000


def waits(seconds: float, lasts_s: float, each_s: float | None = None) -> ExpectedWait:
    """Return the expected wait of a client without requests."""
    return ExpectedWait(seconds, lasts_s if each_s is None else each_s, lasts_s=lasts_s)


def test_a_request_waits_for_its_line_while_others_get_as_much() -> None:
    full = Full()
    assert full.wait("a", 10, None) == waits(0.0, 1.0)
    full.put(20)
    assert full.wait("a", 10, None) == waits(2.0, 1.0)
    assert full.wait("a", 10, None, 30) == waits(5.0, 1.0)
    # Of another client: nothing waits in its line, and the two share the workers.
    assert full.wait("b", 10, None) == waits(0.0, 2.0)
    assert full.wait("b", 10, None, 5) == waits(1.0, 2.0)
    assert full.wait("b", 10, None, 50) == waits(7.0, 2.0, 1.33), "at most all"
    # Another line of the client: the two lines share the client's turn.
    assert full.wait("a", 200, None, 5) == waits(1.0, 22.5, 21.95)
    assert full.wait("a", 10, 4.0, 50) == waits(10.0, 2.0, 1.33)
    full.put(1, "b")
    # At most all that waits, but never less than what waits in the line itself.
    assert full.wait("a", 10, 4.0, 50) == waits(10.0, 4.0, 1.35)


def test_a_line_may_take_half_of_what_is_left() -> None:
    full = Full(max_tokens=100)
    full.put(40)
    assert full.refusal(20, 1000.0) is None
    error = full.refused(25, 1000.0)
    assert error.reason is Rejection.QUEUE_FULL
    assert error.retry_after_s == pytest.approx(0.5)
    assert full.refusal(60, 1000.0, "b") is None, "nothing waits in its line"
    assert full.refusal(61, 1000.0, "b") is not None
    full.admission.tokens_per_s = 0.0
    error = full.refused(25, 1000.0)
    assert error.retry_after_s == 1


def test_a_request_that_would_wait_for_too_long_is_refused() -> None:
    full = Full(waits=WaitLimits(4.0))
    full.put(40)
    assert full.refusal(1, 1000.0) is None
    full.put(3)
    error = full.refused(1, 1000.0)
    assert error.reason is Rejection.WAIT
    assert error.retry_after_s == pytest.approx(0.3)
    assert error.each_s == pytest.approx(0.1)
    full = Full(waits=WaitLimits(1.0))  # which is half of a time that is stated
    full.put(19, timeout_s=4.0)
    assert full.refusal(1, 1000.0, timeout_s=4.0) is None
    full.put(1, timeout_s=4.0)
    error = full.refused(1, 1000.0, timeout_s=4.0)
    assert error.retry_after_s == pytest.approx(0.1)


def test_a_request_that_would_end_too_late_is_refused() -> None:
    full = Full()
    full.put(20)
    # It ends after 2 s + 1 s, and may take half of its time.
    assert full.refusal(10, 6.0) is None
    error = full.refused(10, 5.0)
    assert error.reason is Rejection.DEADLINE
    assert error.retry_after_s == pytest.approx(0.5)


def test_what_was_accepted_must_still_end_in_time() -> None:
    full = Full()
    full.put(60, "a", deadline=NOW + 10)  # due in 9 s, of which it needs 6 s
    assert full.refusal(29, 8.0, "b") is not None, "it would itself end too late"
    assert full.refusal(25, 100.0, "b") is None, "it is due later"
    full.put(20, "c", deadline=NOW + 10)
    assert full.refusal(9, 9.5, "b") is None
    error = full.refused(11, 9.5, "b")
    assert error.reason is Rejection.DEADLINE
    assert error.retry_after_s == pytest.approx(0.1 + 0.0, abs=0.11)


DEFAULT = WaitLimits.of(None, 30_000)


def test_a_client_may_have_64_requests_waiting_however_long_the_wait_is() -> None:
    full = Full(waits=DEFAULT)
    for _ in range(63):
        full.put(2)
        full.activity.requests["a"] += 1
    assert full.wait("a", 2, None).seconds == pytest.approx(12.6)
    assert full.refusal(2, 30.0) is None
    full.put(2)
    full.activity.requests["a"] += 1
    error = full.refused(2, 30.0)
    assert error.reason is Rejection.WAIT
    assert error.retry_after_s == pytest.approx(0.2), "until one of the 64 has ended"
    assert "allows 2.5 s, and more for the first 64 requests of a client" in str(error)


def test_clients_share_the_time_of_their_free_requests() -> None:
    full = Full(waits=DEFAULT)
    for client, many in (("a", 32), ("b", 32), ("c", 8), ("d", 7)):
        for _ in range(many):
            full.put(1, client)
        full.activity.requests[client] = many
    assert full.wait("c", 1, None).clients == 3, "d has less than a quarter of 32"
    assert full.refusal(1, 30.0, "c") is None
    error = full.refused(1, 30.0, "a")
    assert "of a client if they end within 6.67 s" in str(error)
    assert error.retry_after_s == pytest.approx(8.3 - 15.0 / 2.25, rel=0.01)


def test_bulk_requests_have_no_free_ones_since_others_may_take_their_rate() -> None:
    wait = ExpectedWait(3.0, 0.1, 5)
    assert DEFAULT.excess_s(wait, None) <= 0
    assert DEFAULT.excess_s(wait, None, is_bulk=True) == 0.5


def test_a_wait_that_an_operator_has_set_is_exact() -> None:
    exact = WaitLimits.of(2500, 30_000)
    assert exact.excess_s(ExpectedWait(2.5, 0.1, 0), None) <= 0
    assert exact.excess_s(ExpectedWait(2.6, 0.1, 0), None) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("wait", "stated_s", "before", "excess_s"),
    [
        (ExpectedWait(2.5, 1.0, 100), None, 0, 0.0),
        (ExpectedWait(3.0, 0.1, 100), None, 0, 0.5),
        (ExpectedWait(3.0, 0.1, 65), None, 0, 0.2),
        (ExpectedWait(3.0, 0.1, 63), None, 0, 0.0),
        (ExpectedWait(3.0, 0.1, 50), None, 16, 0.3),
        (ExpectedWait(3.0, 0.1, 50), None, 99, 1.75),
        (ExpectedWait(2.0, 0.1, 100), None, 6, 0.1),
        (ExpectedWait(2.0, 0.1, 100), None, 99, 0.75),
        (ExpectedWait(6.5, 0.1, 60, clients=3), None, 0, -0.0667),
        (ExpectedWait(7.0, 0.1, 60, clients=3), None, 0, 0.4333),
        (ExpectedWait(8.0, 0.1, 9, clients=2), None, 99, 0.6),
        (ExpectedWait(3.0, 0.1, 9, clients=8), None, 0, 0.5),
        (ExpectedWait(2.9, 0.1, 0), 6.0, 0, 0.0),
        (ExpectedWait(2.9, 0.1, 0), 4.0, 0, 1.0),
        (ExpectedWait(1.8, 0.1, 0), 4.0, 3, 0.2),
        (ExpectedWait(0.0, 9.0, 0), 4.0, 3, 0.0),
    ],
)
def test_how_long_a_request_has_to_wait_for_room(
    wait: ExpectedWait, stated_s: float | None, before: int, excess_s: float
) -> None:
    wait = wait._replace(lasts_s=wait.per_request_s)
    assert DEFAULT.excess_s(wait, stated_s, before=before) == pytest.approx(excess_s, abs=1e-3)
