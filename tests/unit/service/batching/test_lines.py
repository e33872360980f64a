"""Lines of a client, their classes, and the work that is due."""

import math
import random
from collections import deque

import pytest

from cloze.service.batching.demand import Demand
from cloze.service.batching.lines import Client, Line, LineKey, QueuedEncoding, due_time
from cloze.service.batching.lines import PendingRequest as Request
from cloze.service.core import Submission
from tests.encodings import encoding


@pytest.mark.parametrize(
    ("tokens", "size"), [(1, 0), (127, 0), (128, 1), (1023, 1), (1024, 2), (10**6, 2)]
)
def test_classes_of_size(tokens: int, size: int) -> None:
    assert LineKey.of(tokens, None) == LineKey(size, 0)


@pytest.mark.parametrize(
    ("timeout_s", "patience"),
    [(None, 0), (0.0, 1), (0.9, 1), (1.0, 2), (1.9, 2), (2.0, 3), (3.9, 3), (4.0, 4), (8.0, 5)],
)
def test_classes_of_patience(timeout_s: float | None, patience: int) -> None:
    assert LineKey.of(1, timeout_s) == LineKey(0, patience)
    later = LineKey.of(5000, timeout_s, later_round=True)
    assert later == LineKey(-1, patience), "before all others"


def test_a_request_is_due_a_little_before_its_deadline() -> None:
    assert due_time(100.0, 110.0) == 109.0
    assert due_time(100.0, math.inf) == math.inf


def queued(request: Request, serial: int, length: int) -> QueuedEncoding:
    return QueuedEncoding(serial, length, 0, encoding([1] * length), request, 0)


def test_a_line_knows_its_oldest_encoding() -> None:
    client = Client("a")
    line = Line(client, LineKey(0, 0))
    client.lines[line.key] = line
    assert (line.turn, client.turn) == (-math.inf, -math.inf)
    assert (line.requests, line.tokens, line.groups, client.waits) == (0, 0, {}, False)
    assert line.next_group() is None
    submission = Submission(math.inf, [encoding([1] * 3)])
    request, other = Request(submission, line), Request(submission, line)
    line.groups = {
        5: deque([queued(request, 3, 5), queued(other, 9, 5)]),
        7: deque([queued(other, 2, 7)]),
        6: deque([queued(request, 4, 6)]),
    }
    assert client.waits
    assert line.next_group() == 7
    assert line.next_group(6) == line.next_group(5) == 5
    assert line.next_group(4) is None
    request.set_result(None)  # type: ignore[arg-type]
    line.sweep()
    assert {key: [each.serial for each in group] for key, group in line.groups.items()} == {
        5: [9], 7: [2],
    }  # fmt: skip


# ---- demand -------------------------------------------------------------------------------------


def test_without_work_there_is_no_bound() -> None:
    demand = Demand()
    assert demand.slack_s(0.0, 10.0) == math.inf
    demand.add(math.inf, 1000)
    assert demand.slack_s(0.0, 10.0) == math.inf
    assert demand.slack_s(0.0, 10.0, math.inf, 1000) == math.inf
    assert demand.slack_s(0.0, 10.0, 5.0, 0) == math.inf


def test_slack_is_the_time_until_the_first_due_less_the_work() -> None:
    demand = Demand()
    demand.add(10.05, 20)
    assert demand.slack_s(3.0, 10.0) == pytest.approx(5.0), "dues are rounded down to 0.1 s"
    assert demand.slack_s(9.0, 10.0) == pytest.approx(-1.0)
    demand.add(50.0, 1000)
    assert demand.slack_s(3.0, 10.0) == pytest.approx(-55.0), "50 - 3 - 102"
    demand.add(50.0, -1000)
    assert demand.slack_s(3.0, 10.0) == pytest.approx(5.0)
    demand.add(10.05, -5)
    assert demand.slack_s(3.0, 10.0) == pytest.approx(5.5)


def test_work_that_is_gone_bounds_nothing() -> None:
    demand = Demand()
    demand.add(50.0, 10)
    demand.add(1.0, 10)
    demand.add(30.0, 10)
    demand.add(1.0, -10)
    assert demand.slack_s(0.0, 20.0) == pytest.approx(29.0), "a lower bound: 30 - 20 / 20"
    demand.add(30.0, -10)
    assert demand.slack_s(0.0, 20.0) == pytest.approx(49.5)
    demand.add(50.0, -10)
    assert demand.slack_s(0.0, 20.0) == math.inf


def test_further_work_counts_from_its_due_on() -> None:
    demand = Demand()
    demand.add(10.0, 60)
    demand.add(20.0, 60)
    assert demand.slack_s(0.0, 10.0, 15.0, 20) == pytest.approx(6.0 - 10 + 10, abs=4.1)
    # 20 of 15 s: 8 s of work until then, and 14 s until 20 s.
    assert demand.slack_s(3.0, 10.0, 15.0, 20) == pytest.approx(3.0)
    # Before all: 12 s of work until 20 s leave 5 s; 7 s until 10 s leave 0 s.
    assert demand.slack_s(3.0, 10.0, 5.0, 10) == pytest.approx(0.0)
    assert demand.slack_s(4.0, 10.0, 10.0, 10) == pytest.approx(-1.0)
    assert demand.slack_s(9.0, 10.0, 30.0, 10) == pytest.approx(8.0), "those before are not asked"
    assert demand.slack_s(9.0, 10.0) == pytest.approx(-5.0)


def test_slack_is_the_least_over_all_dues() -> None:
    """Compare with the definition, for random work."""
    generator = random.Random(5)
    for _ in range(300):
        demand, work = Demand(), []
        for _ in range(generator.randrange(6)):
            due, tokens = generator.randrange(1, 12), generator.randrange(1, 40)
            demand.add(due + 0.05, tokens)
            work.append((due, tokens))
        now, rate = generator.uniform(0, 10), generator.uniform(1, 20)
        own_due, own = generator.randrange(1, 12), generator.choice([0, 0, 7])
        every = work + [(own_due, own)] * bool(own)
        least = own_due if own else 0
        exact = min(
            (
                due - now - sum(tokens for other, tokens in every if other <= due) / rate
                for due, _ in every
                if due >= least
            ),
            default=math.inf,
        )
        found = demand.slack_s(now, rate, own_due + 0.05, own)
        assert found == pytest.approx(exact) or 0 < found < exact, "exact, or a bound above zero"
        if exact <= 0:
            assert found == pytest.approx(exact)
