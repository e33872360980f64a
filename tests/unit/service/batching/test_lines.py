"""Lines of a client, their classes, and the work that is due."""

import math
from collections import deque

import pytest

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
