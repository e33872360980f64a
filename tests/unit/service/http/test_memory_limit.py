"""Who gets memory, who waits for it, who is refused, and what slow transfers lose."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from cloze.service.http.memory_limit import SMALL_BYTES, Hold, MemoryLimit, Pace, UnreadAnswers

from cloze.service.core import Overloaded, Rejection
from cloze.service.http import memory_limit
from tests.leaping_loop import run_leaping


class Table:
    """Holds of clients by name: ``a1`` and ``a2`` are of client ``a``."""

    def __init__(self, most: int, max_wait_s: float = 0.0) -> None:
        self.memory = MemoryLimit("bodies", most, max_wait_s)
        self.holds: dict[str, Hold] = {}
        self.waits: dict[str, asyncio.Task[None]] = {}

    async def grow(self, name: str, size: int) -> None:
        hold = self.holds.setdefault(name, Hold(name[0]))
        await self.memory.grow(hold, size)

    async def start(self, name: str, size: int) -> None:
        """Begin to wait, and let all run that can."""
        self.waits[name] = asyncio.ensure_future(self.grow(name, size))
        await settle()

    async def shrink(self, name: str, size: int = 0) -> None:
        self.memory.shrink(self.holds[name], size)
        await settle()

    @property
    def waiting(self) -> list[str]:
        return [name for name, task in self.waits.items() if not task.done()]

    @property
    def refused(self) -> list[str]:
        return [n for n, task in self.waits.items() if task.done() and task.exception()]

    @property
    def sizes(self) -> dict[str, int]:
        return {name: hold.size for name, hold in self.holds.items() if hold.size}


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def play(main: Coroutine[Any, Any, None]) -> None:
    run_leaping(main)


def test_a_hold_grows_to_its_size_and_no_further() -> None:
    async def run() -> None:
        table = Table(100)
        await table.grow("a1", 30)
        await table.grow("a1", 30)
        await table.grow("a1", 20)
        assert table.sizes == {"a1": 30}, "a smaller size changes nothing"
        await table.grow("a1", 45)
        assert table.sizes == {"a1": 45}
        await table.grow("a1", 900)
        assert table.sizes == {"a1": 50}, "a hold has half of the memory at most"
        await table.grow("b1", 50)
        assert table.sizes == {"a1": 50, "b1": 50}, "all of the memory may be held"
        await table.shrink("a1", 60)
        await table.shrink("a1", 50)
        assert table.sizes["a1"] == 50
        await table.shrink("a1", 20)
        await table.shrink("b1")
        assert table.sizes == {"a1": 20}
        table.memory.grow_now(table.holds["b1"], 500)
        assert table.sizes["b1"] == 500, "what cannot wait has no limit"
        await table.start("c1", 1)
        assert table.waiting == ["c1"], "but others wait for it"
        await table.shrink("b1")
        assert table.waiting == []

    play(run())


def test_half_of_an_odd_memory_is_rounded_up() -> None:
    async def run() -> None:
        table = Table(3)
        await table.grow("a1", 2)
        await table.start("a2", 1)
        await table.grow("b1", 1)
        assert table.waiting == ["a2"]
        assert table.sizes == {"a1": 2, "b1": 1}

    play(run())


def test_of_one_client_who_holds_most_goes_first() -> None:
    """A growing hold ends sooner than one that begins; of two, the larger one."""

    async def run() -> None:
        table = Table(200)
        await table.grow("a1", 30)
        await table.grow("a2", 20)
        await table.grow("a3", 40)
        await table.start("a4", 20)
        await table.start("a2", 60)
        await table.start("a1", 70)
        assert table.waiting == ["a4", "a2", "a1"]
        await table.shrink("a3")
        assert table.waiting == ["a4", "a2"]
        assert table.sizes == {"a1": 70, "a2": 20}
        await table.shrink("a1")
        assert table.waiting == []

    play(run())


def test_clients_are_served_by_what_they_hold_and_a_fit_that_is_blocked_blocks() -> None:
    async def run() -> None:
        table = Table(100)
        await table.grow("a1", 30)
        await table.grow("b1", 50)
        await table.grow("c1", 10)
        await table.start("a2", 10)
        assert table.waiting == [], "there are 10 left"
        await table.start("c2", 20)
        await table.start("a3", 5)
        await table.shrink("b1", 45)
        assert table.waiting == ["c2", "a3"], "a's 5 would fit, but c holds less"
        await table.shrink("b1", 30)
        assert table.waiting == ["a3"]
        await table.shrink("b1", 20)
        assert table.waiting == []

    play(run())


def test_a_client_whose_share_is_full_does_not_block_others() -> None:
    async def run() -> None:
        table = Table(100)
        await table.grow("a1", 50)
        await table.start("a2", 10)
        await table.start("b1", 50)
        assert table.waiting == ["a2"]
        await table.shrink("b1", 49)
        assert table.waiting == ["a2"]

    play(run())


def test_refusals_say_what_is_full() -> None:
    async def run() -> None:
        table = Table(100, 2.0)
        await table.grow("a1", 45)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(Overloaded) as own:
            await table.grow("a2", 6)
        assert loop.time() - began == pytest.approx(2.0)
        assert str(own.value) == (
            "the bodies of this client hold 45 bytes; with 6 more they would pass its share of 50"
        )
        assert own.value.reason is Rejection.MEMORY
        assert own.value.retry_after_s == 1
        await table.grow("b1", 50)
        await table.grow("c1", 3)
        with pytest.raises(Overloaded) as others:
            await table.grow("a2", 5)
        assert str(others.value) == (
            "the bodies of all clients hold 98 bytes; with 5 more they would pass the limit of 100"
        )

    play(run())


def test_without_a_limit_a_hold_waits_for_ever() -> None:
    async def run() -> None:
        table = Table(10)
        await table.grow("a1", 5)
        await table.start("a2", 1)
        await asyncio.sleep(100_000)
        assert table.waiting == ["a2"]
        table.waits["a2"].cancel()

    play(run())


def test_who_gives_up_lets_smaller_ones_pass() -> None:
    async def run() -> None:
        table = Table(200, 2.0)
        await table.grow("a1", 60)
        await table.start("a2", 70)
        await asyncio.sleep(1)
        await table.start("a3", 30)
        assert table.waiting == ["a2", "a3"]
        await asyncio.sleep(1.5)
        assert table.refused == ["a2"]
        assert table.sizes == {"a1": 60, "a3": 30}
        await table.start("a4", 70)
        await table.start("a5", 10)
        assert table.waiting == ["a4", "a5"]
        table.waits["a4"].cancel()
        await settle()
        assert table.sizes == {"a1": 60, "a3": 30, "a5": 10}

    play(run())


def test_what_was_given_to_a_task_that_is_cancelled_goes_back() -> None:
    async def run() -> None:
        table = Table(200)
        await table.grow("a1", 80)
        await table.grow("a2", 15)
        await table.start("a2", 60)
        table.memory.shrink(table.holds["a1"])  # it grows, but its task has not run since
        assert table.sizes == {"a2": 60}
        table.waits["a2"].cancel()
        await settle()
        assert table.sizes == {"a2": 15}
        await table.grow("a3", 85)
        assert table.sizes == {"a2": 15, "a3": 85}

    play(run())


@pytest.mark.parametrize(
    ("most", "sizes", "wants", "refused"),
    [
        # The share of a client is held by holds that wait: who loses least goes.
        (200, {"a1": 40, "a2": 20, "a3": 30}, {"a1": 70, "a2": 70, "a3": 70}, ["a2"]),
        # Of two that lose the same, the one that came last.
        (200, {"a1": 40, "a2": 20, "a3": 20}, {"a1": 70, "a2": 70, "a3": 70}, ["a3"]),
        # Another hold of the client still grows: nobody is refused.
        (200, {"a1": 40, "a2": 20, "a3": 30}, {"a1": 70, "a2": 70}, []),
        # The whole memory is: the client that holds most of what is stuck.
        (200, {"a1": 60, "b1": 65, "c1": 60}, {"a1": 90, "b1": 95, "c1": 90}, ["b1"]),
        (200, {"a1": 60, "b1": 65, "c1": 60}, {"a1": 90, "b1": 95}, []),
        # A share is stuck while another client waits for the whole memory.
        (200, {"a1": 50, "a2": 45, "b1": 90}, {"b2": 20, "a1": 80, "a2": 80}, ["a2"]),
    ],
)
def test_if_holds_wait_for_each_other_one_is_refused_at_once(
    most: int, sizes: dict[str, int], wants: dict[str, int], refused: list[str]
) -> None:
    async def run() -> None:
        table = Table(most)
        for name, size in sizes.items():
            await table.grow(name, size)
        for name, size in wants.items():
            await table.start(name, size)
        assert table.refused == refused
        assert table.waiting == [name for name in wants if name not in refused]
        for task in table.waits.values():
            task.cancel()

    play(run())


def test_clients_that_must_hurry() -> None:
    async def run() -> None:
        table = Table(100)
        await table.grow("a1", 50)
        await table.grow("b1", 20)
        assert table.memory.crowding() == set(), "nobody waits"
        await table.start("a2", 1)
        assert table.memory.crowding() == {"a"}, "a waits for its own share"
        await table.start("c1", 31)
        assert table.waiting == ["a2", "c1"]
        assert table.memory.crowding() == {"a"}, "b holds less than a third"
        await table.shrink("b1", 10)
        await table.start("d1", 40)
        await table.shrink("a1", 40)
        assert table.waiting == ["a2", "d1"]
        # a has 40, b 10, c 31 of 81; the average of four clients is 20.25.
        assert table.memory.crowding() == {"a", "c"}
        for name in table.waiting:
            table.waits[name].cancel()

    play(run())


def test_the_average_itself_must_hurry_and_what_cannot_wait_counts() -> None:
    async def run() -> None:
        table = Table(100)
        await table.grow("a1", 50)
        await table.grow("b1", 25)
        await table.grow("c1", 25)
        assert table.memory.crowding() == set(), "a full memory for which nobody waits"
        await table.start("d1", 10)
        assert table.memory.crowding() == {"a", "b", "c"}
        table.waits["d1"].cancel()
        await settle()
        table.memory.grow_now(table.holds["b1"], 26)
        assert table.memory.crowding() == {"a"}, "more is held than may be; a third is 33.7"
        await table.shrink("b1", 25)
        assert table.memory.crowding() == set()

    play(run())


# ---- the pace of transfers ---------------------------------------------------------------------


class Moving:
    """A transfer at a rate that a test sets."""

    def __init__(self, per_s: float, holder: str | None = "a") -> None:
        self.per_s, self.holder = per_s, holder
        self.ended_at = self.slowed_at = -1.0
        self.is_waiting = False
        self.looks = 0

    def moved_bytes(self) -> int | None:
        self.looks += 1
        return None if self.is_waiting else round(self.per_s / 4)

    def slowed(self) -> None:
        if self.slowed_at < 0:
            self.slowed_at = asyncio.get_running_loop().time()

    def end_slow(self) -> None:
        if self.ended_at < 0:
            self.ended_at = asyncio.get_running_loop().time()


async def crowded() -> Table:
    """Return a memory of which client ``a`` holds what client ``b`` waits for."""
    table = Table(100)
    await table.grow("a1", 50)
    await table.grow("c1", 20)
    await table.start("b1", 40)
    assert table.memory.crowding() == {"a"}
    return table


def test_the_rates_of_transfers() -> None:
    assert (memory_limit.RATE, memory_limit.GRACE_S) == (1000, 10.0)
    assert (memory_limit.HURRIED_RATE, memory_limit.HURRIED_GRACE_S) == (65_536, 1.0)


def test_a_transfer_that_stands_still_ends_after_its_grace() -> None:
    async def run() -> None:
        paces = Pace(MemoryLimit("bodies", 100))
        still, least, quick = Moving(0), Moving(1000), Moving(10**6)
        for transfer in (still, least, quick):
            paces.add(transfer)
        await asyncio.sleep(30)
        assert still.ended_at == pytest.approx(10.0)
        assert still.slowed_at == pytest.approx(1.0)
        assert least.ended_at == quick.ended_at == -1
        assert least.slowed_at == pytest.approx(1.25)
        assert quick.slowed_at == -1
        assert quick.looks == 120, "one look per quarter of a second"

    play(run())


def test_time_is_gained_back_up_to_the_grace() -> None:
    async def run() -> None:
        paces = Pace(MemoryLimit("bodies", 100))
        transfer = Moving(0)
        paces.add(transfer)
        await asyncio.sleep(9.1)
        transfer.per_s = 2000
        await asyncio.sleep(5)
        transfer.per_s = 0
        await asyncio.sleep(5)
        assert transfer.ended_at == -1, "it has gained five seconds"
        transfer.per_s = 10**6
        await asyncio.sleep(20)
        transfer.per_s = 0
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(11)
        assert transfer.ended_at - began == pytest.approx(10.0, abs=0.3), "never more than ten"

    play(run())


def test_transfers_of_a_crowding_client_must_hurry() -> None:
    async def run() -> None:
        table = await crowded()
        paces = Pace(table.memory)
        slow, other, holding_nothing = Moving(50_000), Moving(50_000, "c"), Moving(50_000, None)
        quick = Moving(65_536)
        for transfer in (slow, other, holding_nothing, quick):
            paces.add(transfer)
        await asyncio.sleep(30)
        assert 4 < slow.ended_at < 5, "it loses a quarter of a second per second"
        assert slow.slowed_at == slow.ended_at
        assert other.ended_at == holding_nothing.ended_at == quick.ended_at == -1
        assert quick.slowed_at == -1

    play(run())


def test_hurried_time_is_gained_back_up_to_its_grace_and_never_owed() -> None:
    async def run() -> None:
        table = await crowded()
        paces = Pace(table.memory)
        transfer = Moving(0, "c")
        paces.add(transfer)
        await asyncio.sleep(3.1)
        assert transfer.slowed_at == pytest.approx(1.0)
        transfer.per_s = 2 * 65_536
        await asyncio.sleep(0.5)
        transfer.holder, transfer.per_s = "a", 0
        await asyncio.sleep(0.25)
        assert transfer.ended_at == -1, "half a second is gained, whatever was lost before"
        transfer.per_s = 10 * 65_536
        await asyncio.sleep(10)
        transfer.per_s, began = 0, asyncio.get_running_loop().time()
        await asyncio.sleep(2)
        assert transfer.ended_at - began == pytest.approx(1.0, abs=0.3), "never more than one"

    play(run())


def test_a_transfer_that_waits_for_the_server_loses_no_time() -> None:
    async def run() -> None:
        paces = Pace(MemoryLimit("bodies", 100))
        waiting, later = Moving(0), Moving(0)
        waiting.is_waiting = True
        paces.add(waiting)
        await asyncio.sleep(60)
        assert waiting.ended_at == waiting.slowed_at == -1
        paces.add(later)
        paces.remove(waiting)
        paces.remove(waiting)
        looks = waiting.looks
        await asyncio.sleep(12)
        assert waiting.looks == looks
        assert later.ended_at == pytest.approx(70.0)
        paces.remove(later)
        await asyncio.sleep(1)
        assert not paces._ticking, "no timer without a transfer"
        again = Moving(0)
        paces.add(again)
        await asyncio.sleep(11)
        assert again.ended_at > 80

    play(run())


# ---- answers that are not read -----------------------------------------------------------------


class Client:
    """A connection whose client reads when a test says so."""

    def __init__(self, unread: int) -> None:
        self.unread = self.unsent = unread
        self.reason = ""

    def unread_bytes(self) -> int:
        return self.unread

    def unsent_bytes(self) -> int:
        return self.unsent

    def end(self, reason: str) -> None:
        self.reason = reason


BIG = 2 * SMALL_BYTES


def test_only_large_answers_are_held() -> None:
    async def run() -> None:
        answers = UnreadAnswers(2 * BIG)
        assert await answers.hold("a", SMALL_BYTES, waits=True) is None
        hold = await answers.hold("a", SMALL_BYTES + 1, waits=True)
        assert hold is not None
        assert (hold.client, hold.size) == ("a", SMALL_BYTES + 1)

    play(run())


def test_a_large_answer_waits_for_room_unless_it_is_written_already() -> None:
    async def run() -> None:
        answers = UnreadAnswers(2 * BIG)
        first = await answers.hold("a", BIG, waits=True)
        assert first is not None
        waiting = asyncio.ensure_future(answers.hold("a", BIG, waits=True))
        written = await answers.hold("a", 3 * BIG, waits=False)
        assert written is not None
        assert written.size == 3 * BIG
        await settle()
        assert not waiting.done()
        answers.sent(None, written)
        answers.sent(Client(0), first)
        second = await waiting
        assert second is not None
        reader = Client(10)
        answers.sent(reader, second)
        assert answers.is_reading(reader)
        third = asyncio.ensure_future(answers.hold("a", BIG, waits=True))
        await settle()
        assert not third.done(), "the client has not read the second answer"
        answers.was_read(reader)
        answers.was_read(reader)
        assert not answers.is_reading(reader)
        assert await third is not None

    play(run())


def test_three_large_answers_are_written_at_once_and_two_of_one_client() -> None:
    async def run() -> None:
        answers = UnreadAnswers(BIG)
        turns = [await answers.begin("a"), await answers.begin("a")]
        own = asyncio.ensure_future(answers.begin("a"))
        turns.append(await answers.begin("b"))
        other = asyncio.ensure_future(answers.begin("c"))
        await settle()
        assert not own.done()
        assert not other.done()
        answers.done(turns[2])
        await settle()
        assert other.done()
        assert not own.done()
        answers.done(turns[0])
        await own

    play(run())


def test_a_client_that_stops_reading_is_closed() -> None:
    async def run() -> None:
        answers = UnreadAnswers(4 * BIG)
        stopped, reading = Client(BIG), Client(BIG)
        for client in (stopped, reading):
            hold = await answers.hold("a", BIG, waits=True)
            assert hold is not None
            answers.sent(client, hold)
        more = await answers.hold("a", BIG, waits=False)
        assert more is not None
        stopped.unsent += BIG
        answers.sent(stopped, more)
        for _ in range(48):
            await asyncio.sleep(0.25)
            reading.unsent -= 300
        assert stopped.reason == "it reads its answer too slowly"
        assert not reading.reason
        assert answers._memory._held == 3 * BIG
        answers.was_read(stopped)
        assert answers._memory._held == BIG, "all of its answers are released"
        answers.was_read(reading)
        assert answers._memory._held == 0

    play(run())


def test_further_answers_do_not_count_as_bytes_that_were_read_late() -> None:
    """A connection gets answers while it reads nothing: the growth is no progress."""

    async def run() -> None:
        answers = UnreadAnswers(100 * BIG)
        client = Client(BIG)
        for _ in range(50):
            hold = await answers.hold("a", BIG, waits=False)
            assert hold is not None
            answers.sent(client, hold)
            await asyncio.sleep(0.25)
            client.unsent += BIG
        assert client.reason == "it reads its answer too slowly"

    play(run())
