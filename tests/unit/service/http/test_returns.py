"""When refused requests come back, one by one."""

import pytest

from cloze.service.core import ServedRequest
from cloze.service.errors import Rejection
from cloze.service.http import returns as returns_module
from cloze.service.http.returns import RefusedLine, Returns
from tests.support.records import Open, connected

LINE = RefusedLine(Rejection.WAIT, "m@1", "a", 0, False)


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
    made.refuse(first, 110.0)
    made.refuse(second, 110.0, 0.1)
    made.admit(second, 110.6)
    assert before(Open(), LINE, 110.6) == 1, "the second one was told an earlier time"


def test_who_comes_back_as_told_and_is_refused_again_waits_no_longer_than_before() -> None:
    made, first, others = Told(), Open(), [Open() for _ in range(9)]
    for connection in (first, *others):
        made.refuse(connection, 100.0)
    assert made.refuse(first, 102.0)[0] == pytest.approx(2.0), "not after the ninth, in 9 s"
    assert made.refuse(first, 104.0, 3.0)[0] == pytest.approx(3.0), "no room before"


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
    limit = LINE._replace(reason=Rejection.KEY_LIMIT)  # nobody asks who goes before on such a line
    connections = [Open() for _ in range(8)]
    for number, connection in enumerate(connections):
        made.refuse(connection, 200.0 + 100 * number, line=limit)
        made.refuse(connections[0], 250.0 + 100 * number, line=limit)
    assert len(made.returns._due[limit]) <= len(connections)
    for connection in connections:
        made.returns.closed(connection, 2000.0)
    assert not made.returns._due[limit]
