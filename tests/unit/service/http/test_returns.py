"""Closed loops of one client before a full server, in virtual time: who is answered, and when."""

import heapq
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from cloze.service.batching.admission import WaitLimits
from cloze.service.core import ExpectedWait, Rejection
from cloze.service.http.returns import RefusedLine, Returns
from tests.records import connected

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
        waits: whether a refused connection waits: "no", for "seconds", or for "milliseconds".
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
        share = returns.share(asked[number].connection, LINE, now)
        if not queue or LIMITS.excess_s(wait, None, share=share) <= 0:
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
        after_s, hold_s = returns.refuse(asked[number], LINE, now, room_s, 1 / rate)
        if tries[number] == 1:
            first[number] = after_s, now
        delay_s = {"no": hold_s, "seconds": math.ceil(after_s), "milliseconds": after_s}[waits]
        heapq.heappush(events, (now + delay_s + 0.001, serial, number, False))
    return outcome


@pytest.mark.parametrize("rate", [5.0, 40.0, 400.0])
@pytest.mark.parametrize("connections", [8, 64])
def test_up_to_64_connections_are_refused_nothing(connections: int, rate: float) -> None:
    outcome = closed_loop(connections, rate, waits="no")
    assert outcome.refusals == 0
    assert outcome.answers.total() >= 0.98 * rate * SECONDS


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


@pytest.mark.parametrize(("connections", "rate"), [(256, 40.0), (1000, 40.0), (2000, 400.0)])
def test_a_storm_costs_few_refusals_and_no_answers(connections: int, rate: float) -> None:
    outcome = closed_loop(connections, rate, waits="no")
    assert outcome.answers.total() >= 0.98 * rate * SECONDS
    assert outcome.refusals / SECONDS <= 1.5 * connections
