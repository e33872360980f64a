"""Times at which refused requests may come back."""

import pytest

from cloze.service.batching import promises as promises_module
from cloze.service.batching.promises import PromiseKey, Promises

A, B = PromiseKey("bert", "a", 0), PromiseKey("bert", "b", 0)


def test_each_refused_request_gets_a_time_of_its_own() -> None:
    made = Promises()
    assert made.promise(A, 100.0, 2.0, 0.5) == 2.0
    assert made.promise(A, 100.0, 2.0, 0.5) == 2.5
    assert made.promise(A, 101.0, 0.1, 0.5) == 2.0, "half a second after 102.5"
    assert made.promise(A, 101.0, 9.0, 0.5) == 9.0
    assert made.promise(B, 101.0, 0.1, 0.5) == pytest.approx(0.1), "another line"
    assert len(made) == 5


def test_a_time_is_redeemed_once_and_not_early() -> None:
    made = Promises()
    assert not made.redeem(A, 100.0)
    made.promise(A, 100.0, 2.0, 1.0)
    made.promise(A, 100.0, 2.0, 1.0)
    assert not made.redeem(A, 101.9)
    assert not made.redeem(B, 102.0)
    assert made.redeem(A, 101.96)
    assert len(made) == 1
    assert not made.redeem(A, 102.0), "the next time is a second later"
    assert made.outstanding(A, 102.0)
    assert made.redeem(A, 103.0)
    assert (len(made), made.outstanding(A, 103.0)) == (0, False)
    assert not made.redeem(A, 103.0)


def test_a_time_passes() -> None:
    made = Promises()
    made.promise(A, 100.0, 1.0, 1.0)
    made.promise(A, 100.0, 1.0, 1.0)
    assert made.outstanding(A, 104.0)
    assert len(made) == 2
    assert made.redeem(A, 104.0), "three seconds late"
    made.promise(A, 104.0, 10.0, 1.0)
    assert not made.redeem(A, 105.1)
    assert len(made) == 1
    assert not made.outstanding(A, 117.1)
    assert len(made) == 0
    assert not made.outstanding(B, 0.0)


def test_a_time_that_has_passed_delays_nobody() -> None:
    made = Promises()
    made.promise(A, 100.0, 50.0, 1.0)
    assert made.promise(A, 154.0, 1.0, 30.0) == 1.0


def test_no_time_is_later_than_a_minute() -> None:
    made = Promises()
    assert made.promise(A, 100.0, 60.0, 1.0) == 60.0
    assert len(made) == 1
    assert made.promise(A, 100.0, 60.0, 1.0) == 60.0
    assert made.promise(B, 100.0, 1000.0, 1.0) == 60.0
    assert len(made) == 1, "what is not promised is not remembered"
    assert not made.outstanding(B, 100.0)
    assert made.promise(A, 101.0, 1.0, 0.0) == 59.0


def test_promises_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert promises_module._MOST == 8192
    monkeypatch.setattr(promises_module, "_MOST", 8)
    made = Promises()
    waits = [made.promise(A, 100.0, 1.0, 1.0) for _ in range(6)]
    assert waits == [1, 2, 3, 4, 5, 5], "a line holds as many as are left free"
    assert len(made) == 4
    assert [made.promise(B, 100.0, 1.0, 1.0) for _ in range(4)] == [1, 2, 3, 3]
    assert len(made) == 6


def test_passed_times_are_swept_once_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises_module, "_MOST", 8)
    made = Promises()
    for _ in range(3):
        made.promise(A, 100.0, 1.0, 0.0)
    made.promise(B, 110.0, 1.0, 0.0)
    assert len(made) == 4, "there is no need to sweep yet"
    made.promise(B, 110.0, 1.0, 0.0)
    assert len(made) == 2
    third = PromiseKey("bert", "c", 0)
    for _ in range(3):
        made.promise(third, 110.5, 1.0, 0.0)
    assert len(made) == 5
    # Those of the second line pass at 114, those of the third one at 114.5.
    made.promise(PromiseKey("bert", "d", 0), 110.9, 1.0, 0.0)
    assert len(made) == 6
    made.promise(PromiseKey("bert", "e", 0), 114.1, 1.0, 0.0)
    assert len(made) == 5
    made.promise(PromiseKey("bert", "f", 0), 114.9, 1.0, 0.0)
    assert len(made) == 6, "it swept less than a second ago"
    made.promise(PromiseKey("bert", "g", 0), 115.2, 1.0, 0.0)
    assert len(made) == 3


def test_an_early_client_has_little_margin() -> None:
    assert (promises_module._EARLY_S, promises_module._LATE_S) == (0.05, 3.0)
