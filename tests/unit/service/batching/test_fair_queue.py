"""The queue: whose turn it is, what fits into a batch, what is dropped, due and forgotten."""

import math
from collections import Counter
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.model_store.batch import Encoding
from cloze.model_store.heads.entities import EntityRequest
from cloze.service.batching.fair_queue import Batch, FairQueue, LineKey, Submission, Terms
from cloze.service.core import MAX_BATCH_VOCABULARY_ROWS, MAX_PADDING_FACTOR, BatchFill
from tests.support.encodings import encoding

SHORT = LineKey.of(1, None)
LONG = LineKey.of(10_000, None)
BULK = LineKey.of(1, None, is_bulk=True)
FOREVER = float("inf")

NOW = [1000.0]


@pytest.fixture(autouse=True)
def now() -> list[float]:
    NOW[0] = 1000.0
    return NOW


def sized(length: int, rows: int = 0) -> Encoding:
    return encoding([1] * length, masks=range(rows), top_k=1, embed=True)


def submission(
    client: str, *lengths: int, key: LineKey = SHORT, deadline: float = FOREVER, rows: int = 0
) -> Submission:
    """Return encodings of some lengths, in a line of the test's choice, as admitted now."""
    terms = Terms(deadline, client, is_bulk=key.is_bulk)
    request = Submission(terms, [sized(length, rows) for length in lengths])
    request.key, request.submitted = key, NOW[0]
    request.due = math.inf if key.is_bulk else NOW[0] + 0.9 * (deadline - NOW[0])
    return request


class Queue(FairQueue):
    """A queue to which a test adds by lengths."""

    def __init__(self, *, varlen: bool = False) -> None:
        super().__init__(varlen=varlen)

    def put(self, client: str, *lengths: int, **options: Any) -> Submission:
        request = submission(client, *lengths, **options)
        self.add(request)
        request.add_done_callback(lambda _: self.forget(request))
        return request

    def taken(self, max_tokens: int = 100, **options: Any) -> Batch:
        """Return the next batch, taken now."""
        return self.take(max_tokens, NOW[0], **options)

    def took(self, max_tokens: int = 100, **options: Any) -> list[int]:
        """Return the lengths of the next batch."""
        return lengths_of(self.taken(max_tokens, **options))


def lengths_of(taken: Batch) -> list[int]:
    return [queued.tokens for queued in taken.encodings]


def test_classes_of_size_and_patience() -> None:
    for tokens, size in ((1, 0), (127, 0), (128, 1), (1023, 1), (1024, 2), (10**6, 2)):
        assert LineKey.of(tokens, None) == LineKey(size, 0)
    for timeout_s, patience in ((0.0, 1), (0.9, 1), (1.0, 2), (2.0, 3), (3.9, 3), (8.0, 5)):
        assert LineKey.of(1, timeout_s) == LineKey(0, patience)


def test_a_later_round_goes_before_all_others() -> None:
    queue = Queue()
    queue.put("a", 5)
    later = Submission(Terms(FOREVER, "a", timeout_s=3.0, later_round=True), [sized(6)])
    queue.add(later)
    assert queue.lines[later].key == LineKey(-1, 3)
    assert later.key == LineKey(0, 3), "another request like it has a first round"
    assert [queue.took(), queue.took()] == [[6], [5]]


@pytest.mark.parametrize("other", ["a", "b"])
def test_clients_and_their_lines_take_turns_by_tokens(other: str) -> None:
    queue = Queue()
    queue.put("a", 10, 11, 12, 13, key=LONG)
    queue.put(other, 4, 5, 6, 7)
    lengths = [length for _ in range(8) for length in queue.took(1)]
    assert lengths[2:] == [5, 6, 11, 7, 12, 13]
    assert set(lengths[:2]) == {10, 4}


@pytest.mark.parametrize("other", ["a", "b"])
def test_a_request_of_many_texts_does_not_starve_behind_single_ones(other: str) -> None:
    queue = Queue()
    many = queue.put("a", *range(20, 40), key=LONG)
    for _ in range(90):  # 20 texts of 590 tokens, and as many tokens in 59 single ones
        if queue.share(other, SHORT)[0] < 30:
            queue.put(other, 10, 10, 10)
        queue.took(1)
    assert many.queued_tokens == 0


def test_a_client_that_waits_keeps_its_turn_when_more_arrives() -> None:
    """Else one that goes on asking would fall behind a newcomer."""
    queue = Queue()
    queue.put("a", 50)
    queue.put("b", 10)
    assert queue.took(50) == [50]  # virtual time is 25 now
    queue.put("newcomer", 8)
    queue.put("b", 10)
    queue.put("b", 10)
    assert [queue.took(10) for _ in range(4)] == [[10], [10], [10], [8]]


def test_a_line_owes_on_while_its_request_runs() -> None:
    """Nothing of it waits for a while, so it begins to wait again: with the debt of what ran."""
    queue = Queue()
    queue.put("a", 50)
    for _ in range(5):
        queue.put("a", 10, key=LONG)
    assert queue.took(50) == [50]
    queue.put("a", 7)
    assert [queue.took(10) for _ in range(6)] == [[10]] * 5 + [[7]]


def test_a_batch_is_of_one_length_unless_lengths_may_be_mixed() -> None:
    for varlen, expected in ((False, [3, 3]), (True, [3, 4, 3])):
        queue = Queue(varlen=varlen)
        queue.put("a", 3, 4)
        queue.put("b", 3)
        taken = queue.taken(100)
        assert lengths_of(taken) == expected
        assert taken.fill is BatchFill.WAITING
        assert taken.expired == []
        assert [queued.position for queued in taken.encodings] == (
            [0, 0] if not varlen else [0, 1, 0]
        )


@pytest.mark.parametrize("varlen", [False, True])
def test_tokens_bound_a_batch(varlen: bool) -> None:
    queue = Queue(varlen=varlen)
    queue.put("a", 5, 5, 5)
    queue.put("b", 5)
    taken = queue.taken(10)
    assert (lengths_of(taken), taken.fill) == ([5, 5], BatchFill.TOKENS)
    assert queue.tokens == 10
    assert lengths_of(queue.taken(9)) == [5]
    long = Queue(varlen=True)
    long.put("a", 50, 1)
    taken = long.taken(10)
    assert (lengths_of(taken), taken.fill) == ([50], BatchFill.TOKENS), "it runs alone"
    assert long.took(10) == [1]


def test_rows_of_the_vocabulary_bound_a_batch() -> None:
    half = MAX_BATCH_VOCABULARY_ROWS // 2
    queue = Queue()
    for _ in range(3):
        queue.put("a", 70, rows=half)
    taken = queue.taken(10_000)
    assert (lengths_of(taken), taken.fill) == ([70, 70], BatchFill.VOCABULARY)
    queue.put("a", 70, rows=1)
    assert queue.took(10_000) == [70, 70]
    queue.put("b", 200, rows=MAX_BATCH_VOCABULARY_ROWS + 1)
    queue.put("b", 200, rows=0)
    assert queue.took(10_000) == [200], "one may exceed the limit"
    queue.put("c", 300, rows=half + 1)
    queue.put("c", 300, rows=half)
    assert queue.took(10_000, longest=299) == [200]
    assert queue.took(10_000) == [300], "one row too many"


def test_padding_bounds_a_batch() -> None:
    assert MAX_PADDING_FACTOR == 4
    queue = Queue(varlen=True)
    queue.put("a", 10, *[1] * 10)
    taken = queue.taken(20)  # 8 x 10 cells are 4 x 20
    assert (lengths_of(taken), taken.fill) == ([10, *[1] * 7], BatchFill.PADDING)
    assert queue.took(20) == [1, 1, 1]
    queue.put("a", *[1] * 7, 10, 1)
    taken = queue.taken(20)
    assert (lengths_of(taken), taken.fill) == ([*[1] * 7, 10], BatchFill.PADDING)
    assert queue.took(20) == [1]
    queue.put("a", *[1] * 8, 10, 1)
    assert queue.took(20) == [1] * 8, "the next one is longer, and would make 9 x 10 cells"


def test_padding_within_a_head_bounds_a_batch() -> None:
    """A head pads words and labels to the most of a batch: 2 x 300 x 50 cells are 27 times real."""
    queue = Queue(varlen=True)

    def put(*sizes: tuple[int, int]) -> None:
        asked = [{"entities": EntityRequest([1] * words, [1] * labels)} for words, labels in sizes]
        row = np.ones(3, np.int32)
        request = Submission(Terms(FOREVER, "a"), [Encoding(row, row, each) for each in asked])
        request.due = FOREVER
        queue.add(request)

    def taken() -> tuple[list[tuple[int, ...]], BatchFill]:
        batch = queue.taken(10_000)
        return [each.encoding.padded_sizes["entities"] for each in batch.encodings], batch.fill

    put((10, 50), (300, 2), (300, 2))
    assert taken() == ([(10, 50)], BatchFill.PADDING)
    assert taken() == ([(300, 2)] * 2, BatchFill.WAITING)
    put((64, 64), (64, 1), (1, 64), (2, 2), (2, 2))  # the first has 4096 cells
    assert taken() == ([(64, 64), (64, 1), (1, 64), (2, 2)], BatchFill.PADDING)
    assert taken() == ([(2, 2)], BatchFill.WAITING)
    put((2, 2))
    queue.put("b", 3)  # asks other heads
    assert len(queue.took()) == 2


def test_workers_share_what_waits() -> None:
    queue = Queue()
    queue.put("a", *[5] * 4)
    queue.put("b", *[5] * 3)
    taken = queue.taken(100, takers=2)
    assert (lengths_of(taken), taken.fill) == ([5] * 4, BatchFill.SHARE)
    assert queue.took(100, takers=2) == [5, 5]
    assert queue.took(100, takers=9) == [5]
    mixed = Queue(varlen=True)
    mixed.put("a", *[5] * 4)
    assert mixed.took(100, takers=2) == [5] * 4, "one worker packs while the other runs"


def test_only_short_ones_are_looked_for() -> None:
    queue = Queue()
    queue.put("a", 30, 10)
    queue.put("b", 11)
    assert [queue.has_up_to(length) for length in (9, 10, 30)] == [False, True, True]
    assert queue.took(100, longest=10) == [10]
    assert [queue.has_up_to(length) for length in (10, 11)] == [False, True]
    assert queue.took(100, longest=29) == [11]
    assert not queue.has_up_to(29)
    assert queue.took(100) == [30]


def test_what_could_end_too_late_goes_before_turns(now: list[float]) -> None:
    queue = Queue()
    queue.put("a", 20)
    queue.put("b", 30, deadline=now[0] + 4.0)
    queue.put("c", 10, deadline=now[0] + 2.0)
    queue.put("c", 12)
    assert queue.took(1, rate=1000.0) == [20], "there is time"
    queue.put("a", 21)
    # At 10 tokens per second they end after 1 s and 4 s, and are due in 1.8 s and 3.6 s.
    assert queue.took(1, rate=10.0) == [10]
    assert queue.took(1, rate=10.0) == [30]
    assert queue.took(1, rate=10.0) == [12], "the others have no deadline"


def test_a_request_whose_time_is_over_does_not_run(now: list[float]) -> None:
    queue = Queue()
    over = queue.put("a", 5, deadline=now[0])
    queue.put("a", 5, deadline=now[0] + 0.01)
    taken = queue.taken(100)
    assert (lengths_of(taken), taken.expired) == ([5], [over])
    assert queue.tokens == 0
    last = queue.put("a", 5, deadline=now[0])
    taken = queue.taken(100, rate=1000.0)
    assert (lengths_of(taken), taken.expired) == ([], [last]), "the last one too"
    assert over.started is None


def test_a_request_that_cannot_end_in_time_does_not_run(now: list[float]) -> None:
    queue = Queue()
    hopeless = queue.put("a", 10, 11, 12, deadline=now[0] + 2.0)
    queue.put("b", 15, deadline=now[0] + 1.0)
    queue.put("c", 40)
    # At 10 per second, 33 tokens take 3.3 s, more than 1.5 x 2 s; 15 take 1.5 x 1 s.
    taken = queue.taken(100, rate=10.0)
    assert (lengths_of(taken), taken.expired) == ([15], [])
    taken = queue.taken(100, rate=10.0)
    assert (lengths_of(taken), taken.expired) == ([], [hopeless])
    assert hopeless.queued_tokens == 23
    queue = Queue()
    last = queue.put("a", 50, 50, deadline=now[0] + 0.1)
    taken = queue.taken(100, rate=1.0)
    assert (lengths_of(taken), taken.expired) == ([50, 50], []), "unless it is the last one"
    assert last.started == now[0]


def test_what_a_request_waits_behind() -> None:
    queue = Queue()
    assert queue.share("a", SHORT) == (0, 1, 1)
    queue.put("a", 5, 6)
    queue.put("b", 7)
    assert queue.share("a", SHORT) == (11, 1, 2)
    assert queue.share("a", LONG) == (0, 2, 2)
    assert queue.share("new", LONG) == (0, 1, 3)
    queue.put("a", 50, key=LONG)
    assert queue.share("a", SHORT) == (11, 2, 2)
    assert queue.share("a", LONG) == (50, 2, 2)
    queue.taken(1)
    assert queue.share("a", SHORT)[0] == 6


def test_clients_may_come_while_a_share_is_counted() -> None:
    queue, numbers = Queue(), count()
    queue.put("a", 5)
    queue.put("b", 7)

    class Interrupted:
        @property
        def is_bulk(self) -> bool:
            queue.put(f"new-{next(numbers)}", 1)  # as another thread may
            return False

    assert queue.share("a", Interrupted())[2] == 2  # type: ignore[arg-type]


def test_due_tokens_are_those_that_wait(now: list[float]) -> None:
    queue = Queue()
    request = queue.put("a", 10, 20, deadline=now[0] + 10)
    assert queue.demand.slack_s(now[0], 10.0) == pytest.approx(9 - 3)
    queue.taken(10, rate=100.0)
    assert queue.demand.slack_s(now[0], 10.0) == pytest.approx(9 - 2)
    request.cancel()
    assert queue.demand.slack_s(now[0], 10.0) == FOREVER


def test_a_client_stays_while_its_requests_run() -> None:
    queue = Queue()
    request = queue.put("a", 5)
    other = queue.put("a", 6, key=LONG)
    assert queue.took() == [5]
    assert queue.share("b", SHORT)[2] == 2
    assert queue.share("a", SHORT) == (0, 2, 1)
    request.set_result(None)  # type: ignore[arg-type]
    assert queue.share("a", LONG) == (6, 1, 1)
    queue.took()
    other.set_result(None)  # type: ignore[arg-type]
    assert queue._clients == {}


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "end", "forget", "take", "take short"]),
        st.integers(0, 3),
        st.lists(st.integers(1, 3), min_size=1, max_size=4),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps=steps, varlen=st.booleans())
def test_sums_are_those_of_the_encodings_in_memory(
    steps: list[tuple[str, int, list[int]]], varlen: bool
) -> None:
    """Requests end at any time, and are forgotten later."""
    queue = FairQueue(varlen=varlen)
    added: list[Submission] = []
    forgotten: set[Submission] = set()
    for kind, number, lengths in steps:
        chosen = added[number % len(added)] if added else None
        if kind == "add":
            added.append(submission("ab"[number // 2], *lengths, key=LineKey(number % 2, 0)))
            queue.add(added[-1])
        elif kind == "end" and chosen and not chosen.done():
            chosen.cancel()
        elif kind == "forget" and chosen and chosen.done() and chosen not in forgotten:
            queue.forget(chosen)
            forgotten.add(chosen)
        elif kind == "take" and queue.tokens:
            for queued in queue.take(5, NOW[0]).encodings:
                assert not queued.request.done()
        elif kind == "take short" and not varlen and queue.has_up_to(2):
            assert all(queued.tokens <= 2 for queued in queue.take(5, NOW[0], longest=2).encodings)
        lines = [line for client in queue._clients.values() for line in client.lines.values()]
        held: Counter[Submission] = Counter()
        for line in lines:
            own = [queued for group in line.groups.values() for queued in group]
            for queued in own:
                held[queued.request] += queued.tokens
            assert line.tokens == sum(q.tokens for q in own if q.request not in forgotten)
            assert line.ended_tokens == sum(q.tokens for q in own if q.request in forgotten)
            assert line.ended_tokens <= line.tokens, "ended requests would fill the memory"
            assert all(line.groups.values()), "an empty group stays"
        assert queue.tokens == sum(line.tokens for line in lines)
        assert all(each.queued_tokens == held[each] for each in added if each not in forgotten)
        assert queue.lines.keys() == set(added) - forgotten


def test_bulk_requests_take_what_others_leave() -> None:
    queue = Queue()
    queue.put("bulk", 7, 7, 8, key=BULK)
    queue.put("a", 7)
    queue.put("bulk", 6)
    assert queue.share("bulk", BULK) == (22, 1, 1)
    assert queue.share("bulk", SHORT) == (6, 1, 2)
    assert (queue.tokens, queue.bulk_tokens) == (35, 22)
    assert queue.took() == [7], "no bulk text makes the batch of a question longer"
    assert queue.took() == [6]
    assert queue.took() == [7, 7]
    assert queue.took() == [8]
    assert (queue.tokens, queue.bulk_tokens, queue._clients.keys()) == (0, 0, queue._clients.keys())


def test_bulk_requests_age_and_never_starve() -> None:
    queue = Queue()
    bulk = [queue.put(name, *[10] * 20, key=BULK) for name in ("one", "other")]
    ran, waits = 0, [0]
    for _ in range(400):
        for name in "abcde":
            if queue.share(name, SHORT)[0] < 30:
                queue.put(name, 10, 10, 10)
        batch = queue.taken(10)
        assert len(batch.encodings) == 1
        ran += batch.is_bulk
        waits = [*waits, 0] if batch.is_bulk else [*waits[:-1], waits[-1] + 1]
    assert max(waits) <= 10, "one batch in ten is theirs, however many others wait"
    assert 35 <= ran <= 40
    left = [request.queued_tokens for request in bulk]
    assert abs(left[0] - left[1]) <= 10, "and clients have equal shares of them"


def test_bulk_requests_of_many_lengths_get_a_tenth_too() -> None:
    """Each batch has one length, so that a batch of bulk requests has one short text."""
    queue, ran = Queue(), Counter[bool]()
    queue.put("bulk", *range(5, 45), key=BULK)
    for _ in range(50):
        queue.put("a", *[10] * 10)
    while queue.bulk_tokens and queue.tokens > queue.bulk_tokens:
        batch = queue.taken(100)
        ran[batch.is_bulk] += batch.tokens
    assert ran[True] / ran.total() == pytest.approx(0.1, abs=0.03)
