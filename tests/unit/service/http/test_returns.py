"""When refused requests come back: one by one, and in closed loops in virtual time."""

import heapq
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from cloze.service.batching.admission import WaitLimits
from cloze.service.batching.fair_queue import ExpectedWait
from cloze.service.core import ServedRequest
from cloze.service.errors import Rejection
from cloze.service.http import returns as returns_module
from cloze.service.http.returns import RefusedLine, Returns
from tests.support.records import Open, connected

LINE = RefusedLine(Rejection.WAIT, "m@1", "a", 0, False)
LIMITS = WaitLimits.of(None, 30_000)
SECONDS = 60.0


@dataclass
class Outcome:
    """What connections got in a minute.

    Attributes:
        answers: number of answers by connection.
        tries: number of requests that were admitted at their first, second, ... try.
        told: what a connection was told first, over the time until it was admitted.
    """

    answers: Counter[int] = field(default_factory=Counter)
    refusals: int = 0
    tries: Counter[int] = field(default_factory=Counter)
    told: list[float] = field(default_factory=list)


def closed_loop(connections: int, rate: float, *, waits: str) -> Outcome:
    """Let connections ask again and again; one worker answers so many requests per second.

    Args:
        waits: whether a refused connection waits for whole seconds, or for milliseconds.
    """
    draw, outcome, returns = random.Random(1), Outcome(), Returns()
    asked = [connected("a") for _ in range(connections)]
    queue: deque[int] = deque()
    tries, first = Counter[int](), dict[int, tuple[float, float]]()
    events = [(0.05 * draw.random(), number, number, False) for number in range(connections)]
    heapq.heapify(events)
    while events and events[0][0] < SECONDS:
        now, serial, number, is_answer = heapq.heappop(events)
        serial += connections
        if is_answer:
            outcome.answers[number] += 1
            queue.popleft()
            if queue:
                seconds = draw.uniform(0.85, 1.15) / rate
                heapq.heappush(events, (now + seconds, serial + 1, queue[0], True))
            heapq.heappush(events, (now + draw.uniform(0.001, 0.003), serial, number, False))
            continue
        tries[number] += 1
        asked[number].arrived = now
        wait = ExpectedWait(max(0, len(queue) - 1) / rate, 1 / rate, len(queue))
        before = returns.before(asked[number].connection, LINE, now)
        if not queue or LIMITS.excess_s(wait, None, before=before) <= 0:
            returns.admitted(asked[number])
            outcome.tries[tries[number]] += 1
            if tries.pop(number) > 1:
                told_s, refused = first[number]
                outcome.told.append(told_s / (now - refused))
            queue.append(number)
            if len(queue) == 1:
                heapq.heappush(events, (now + 1 / rate, serial, number, True))
            continue
        outcome.refusals += 1
        room_s = max(0.0, LIMITS.excess_s(wait, None))
        after_s, _ = returns.refuse(asked[number], LINE, now, room_s, 1 / rate)
        if tries[number] == 1:
            first[number] = after_s, now
        delay_s = math.ceil(after_s) if waits == "seconds" else after_s
        heapq.heappush(events, (now + delay_s + 0.001, serial, number, False))
    return outcome


@pytest.mark.parametrize("waits", ["seconds", "milliseconds"])
@pytest.mark.parametrize(("connections", "rate"), [(100, 3.0), (256, 40.0), (1000, 40.0)])
def test_who_waits_as_told_is_admitted_then(connections: int, rate: float, waits: str) -> None:
    outcome = closed_loop(connections, rate, waits=waits)
    assert outcome.refusals > 0
    assert outcome.answers.total() >= 0.98 * rate * SECONDS
    returned = outcome.tries.total() - outcome.tries[1]
    assert outcome.tries[2] >= 0.9 * returned
    assert max(outcome.told) <= 2.0, "nobody is told to wait for more than twice as long"
    spread = [outcome.answers[number] for number in range(connections)]
    assert max(spread) - min(spread) <= 3, "all connections are served alike"


class Told:
    """What requests are told, and how long their refusals are held."""

    def __init__(self, processes: int = 1) -> None:
        self.returns = Returns(processes)

    def refuse(
        self,
        connection: Open,
        now: float,
        room_s: float = 2.0,
        each_s: float = 0.5,
        line: RefusedLine = LINE,
    ) -> tuple[float, float]:
        return self.returns.refuse(self.asked(connection, now), line, now, room_s, each_s)

    def admit(self, connection: Open, now: float) -> None:
        self.returns.admitted(self.asked(connection, now))

    @staticmethod
    def asked(connection: Open, now: float) -> ServedRequest:
        record = connected("a")
        record.connection, record.arrived = connection, now
        return record


def test_refused_requests_come_back_one_after_another() -> None:
    made = Told()
    assert [made.refuse(Open(), 100.0)[0] for _ in range(3)] == [2.0, 2.5, 3.0]
    assert made.refuse(Open(), 101.0, 1.0)[0] == 2.5, "half a second after 103"
    assert made.refuse(Open(), 101.0, 0.1)[0] == pytest.approx(2.1), "four are due in two seconds"
    assert made.refuse(Open(), 101.0, 9.0)[0] == 9.0
    other = LINE._replace(client="b")
    assert made.refuse(Open(), 101.0, 0.1, line=other)[0] == pytest.approx(0.1)


def test_each_of_several_processes_tells_its_part_of_the_rate() -> None:
    made = Told(4)
    assert [made.refuse(Open(), 100.0)[0] for _ in range(3)] == [2.0, 4.0, 6.0]


def test_those_that_are_due_go_before_others_until_their_time() -> None:
    made, first, second = Told(), Open(), Open()
    for connection in (first, second):
        made.refuse(connection, 100.0)
    before = made.returns.before
    assert (before(Open(), LINE, 101.0), before(second, LINE, 101.0)) == (2, 2)
    assert (before(Open(), LINE, 102.2), before(second, LINE, 102.2)) == (1, 1)
    assert before(first, LINE, 102.2) == 0, "it comes as told"
    assert before(Open(), LINE._replace(client="b"), 101.0) == 0
    made.admit(second, 102.2)
    assert before(Open(), LINE, 102.2) == 0


def test_a_time_is_given_back_by_who_is_admitted_early_or_leaves() -> None:
    made, first, second = Told(), Open(), Open()
    for connection in (first, second):
        made.refuse(connection, 100.0)
    made.admit(second, 101.0)
    made.returns.closed(second, 101.0)
    assert made.refuse(Open(), 101.0, 1.0)[0] == pytest.approx(1.5), "at 102.5 again"
    made.returns.closed(Open(), 101.0)


def test_a_refusal_of_who_has_left_is_kept_for_nobody() -> None:
    made, gone = Told(), Open()
    gone.leave()
    assert made.refuse(gone, 100.0) == (2.0, 0.0)
    assert not made.returns.refused
    assert made.refuse(Open(), 100.0)[0] == 2.0


def test_other_lines_of_a_client_are_no_way_around_the_holds() -> None:
    made, connection = Told(), Open()
    lines = [LINE._replace(patience=number % 2) for number in range(4)]
    told = [made.refuse(connection, 100.0 + n / 10, line=line) for n, line in enumerate(lines)]
    assert [held for _, held in told] == [0.0, 0.25, 0.5, 1.0]
    assert {after for after, _ in told} == {2.0}, "a connection has one time in all"
    proxied = LINE._replace(client="b")
    assert made.refuse(connection, 100.5, line=proxied)[1] == 0.0, "another client behind a proxy"


def test_no_time_is_later_than_a_minute_or_sooner_than_a_twentieth_of_a_second() -> None:
    made = Told()
    assert made.refuse(Open(), 100.0, 0.001, 0.001)[0] == pytest.approx(0.05)
    for _ in range(100):
        latest, _ = made.refuse(Open(), 100.0, 1.0, 1.0)
    assert latest == pytest.approx(59.99)
    assert made.refuse(Open(), 100.0, 250.0)[0] == pytest.approx(59.99)


def test_the_lines_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns_module, "_MOST_LINES", 3)
    made = Told()
    for number in range(10):
        made.refuse(Open(), 100.0, line=LINE._replace(client=str(number)))
    assert len(made.returns._last) <= 3
