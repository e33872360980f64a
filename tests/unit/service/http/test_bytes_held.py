"""Who gets bytes, who waits for them, and who is refused."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.service.errors import Overloaded, Rejection
from cloze.service.http.bytes_held import ByteBudget, Hold
from tests.support.leaping_loop import run_leaping

pytestmark = pytest.mark.anyio

LONG_S = 1000.0


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def held(budget: ByteBudget, client: str, size: int, left_s: float = LONG_S) -> Hold:
    """Return a new hold that has so many bytes; it ends if it does not get them."""
    hold = Hold(client)
    try:
        await budget.grow(hold, size, left_s)
    except BaseException:
        budget.release(hold)
        raise
    return hold


async def asking(budget: ByteBudget, client: str, size: int) -> asyncio.Task[Hold]:
    """Begin to wait for bytes."""
    task = asyncio.create_task(held(budget, client, size))
    await settle()
    return task


async def test_bytes_are_released_as_they_were_got() -> None:
    budget = ByteBudget("bodies", 100)
    first, second = await held(budget, "a", 40), await held(budget, "b", 30)
    await budget.grow(first, 30, LONG_S)
    assert first.size == 40, "it has them already"
    await budget.grow(first, 50, LONG_S)
    waiting = await asking(budget, "c", 40)
    assert not waiting.done()
    budget.shrink(second, 10)
    assert (await waiting).size == 40
    budget.shrink(second, 20)
    assert second.size == 10, "a hold never grows by `shrink`"
    for hold in (first, second, waiting.result()):
        budget.release(hold)
        budget.release(hold)
        assert hold.size == 0
    for client in "abcd":
        assert (await held(budget, client, 25)).size == 25, "all of it is free again"


async def test_a_client_gets_half_and_another_gets_the_rest() -> None:
    budget = ByteBudget("bodies", 200)
    own = [await held(budget, "a", 60), await held(budget, "a", 40)]
    more = await asking(budget, "a", 1)
    assert not more.done()
    assert (await held(budget, "b", 100)).size == 100, "the wait of another does not matter"
    budget.release(own[1])
    assert (await more).size == 1


@pytest.mark.parametrize("most", [200, 201])
async def test_the_first_body_of_a_client_may_pass_its_half(most: int) -> None:
    budget = ByteBudget("bodies", most)
    assert (await held(budget, "a", 150)).size == 150
    assert not (await asking(budget, "a", 1)).done()
    other = ByteBudget("bodies", most)
    await held(other, "a", most - most // 2)
    assert not (await asking(other, "a", 1)).done(), "an odd byte belongs to the half"


async def test_the_first_hold_of_all_may_pass_the_limit() -> None:
    budget = ByteBudget("bodies", 100)
    first, second = await held(budget, "a", 50), await held(budget, "b", 50)
    growing = asyncio.create_task(budget.grow(second, 80, LONG_S))
    await settle()
    assert not growing.done()
    await budget.grow(first, 90, LONG_S)
    assert (first.size, second.size) == (90, 50)
    budget.release(first)
    await growing
    assert second.size == 80


async def test_holds_that_wait_come_in_the_order_of_their_arrival() -> None:
    budget = ByteBudget("bodies", 100)
    first, second = await held(budget, "a", 40), await held(budget, "b", 40)
    large, small = await asking(budget, "c", 45), await asking(budget, "d", 20)
    third = await asking(budget, "e", 20)
    assert not small.done(), "it would fit, but came later"
    budget.release(second)
    await settle()
    assert (large.done(), small.done(), third.done()) == (True, False, False)
    budget.release(first)
    await settle()
    assert (small.done(), third.done()) == (True, True)


async def test_who_gives_up_does_not_stand_in_the_way() -> None:
    budget = ByteBudget("bodies", 100)
    await held(budget, "a", 40)
    await held(budget, "b", 40)
    large, small = await asking(budget, "c", 45), await asking(budget, "d", 20)
    large.cancel()
    await settle()
    assert small.done()
    assert (await small).size == 20


async def test_bytes_that_were_got_while_their_request_ended_are_released() -> None:
    budget = ByteBudget("bodies", 100)
    first = await held(budget, "a", 90)
    gone = await asking(budget, "b", 40)
    budget.release(first)  # so it has the bytes, but has not run since
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (await held(budget, "c", 50)).size == 50
    assert (await held(budget, "d", 50)).size == 50


@pytest.mark.parametrize(("longest_s", "left_s", "waits_s"), [(0, 7, 7), (2, 7, 2), (9, 7, 7)])
async def test_the_longest_wait(longest_s: float, left_s: float, waits_s: float) -> None:
    budget, loop = ByteBudget("bodies", 100, longest_s), asyncio.get_running_loop()
    first = await held(budget, "a", 40)
    await held(budget, "b", 50)
    began = loop.time()
    with pytest.raises(Overloaded) as refused:
        await held(budget, "a", 30, left_s)
    assert loop.time() - began == pytest.approx(waits_s)
    assert str(refused.value) == (
        "the bodies of this client hold 40 bytes; with 30 more they would pass its share of 50"
    )
    assert (refused.value.reason, refused.value.retry_after_s) == (Rejection.MEMORY, 1)
    with pytest.raises(Overloaded) as refused:
        await held(budget, "c", 20, left_s)
    assert str(refused.value) == (
        "the bodies of all clients hold 90 bytes; with 20 more they would pass the limit of 100"
    )
    budget.release(first)
    assert (await held(budget, "c", 50)).size == 50


LIMIT, LARGEST = 100, 80

bodies = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.lists(st.integers(1, LARGEST), min_size=1, max_size=5),
        st.sampled_from(["ends", "shrinks", "leaves", "waits for all"]),
    ),
    min_size=1,
    max_size=12,
)
"""Of each body: its client, the sizes that it grows to, and what happens then."""


@given(bodies, st.integers(0, 2**32), st.sampled_from([0.0, 5.0]))
@settings(max_examples=300, deadline=None)
def test_half_sent_bodies_never_wait_for_each_other_for_ever(
    plans: list[tuple[str, list[int], str]], seed: int, longest_s: float
) -> None:
    """Each one ends, within bounds, and nothing of it is left."""
    order = random.Random(seed)
    holds: list[Hold] = []
    ends: list[str] = []

    def check() -> None:
        total = sum(hold.size for hold in holds)
        assert total <= LIMIT + max(hold.size for hold in holds), "one hold is above the limit"

    async def body(budget: ByteBudget, client: str, sizes: list[int], end: str) -> None:
        hold = Hold(client)
        holds.append(hold)
        try:
            for size in sorted(sizes):
                await budget.grow(hold, size, LONG_S)
                assert hold.size >= size
                check()
                for _ in range(order.randrange(4)):
                    await asyncio.sleep(0)
            if end == "shrinks":
                budget.shrink(hold, order.randrange(hold.size + 1))
                check()
            await asyncio.sleep(order.random())
            ends.append("whole")
        except Overloaded:
            assert longest_s, "without a longest wait, each one gets its bytes"
            ends.append("refused")
        except asyncio.CancelledError:
            ends.append("gone")
            raise
        finally:
            budget.release(hold)

    async def run() -> None:
        budget = ByteBudget("bodies", LIMIT, longest_s)
        tasks = []
        for client, sizes, end in plans:
            tasks.append(asyncio.create_task(body(budget, client, sizes, end)))
            for _ in range(order.randrange(3)):
                await asyncio.sleep(0)
            if end == "leaves":
                tasks[order.randrange(len(tasks))].cancel()
        loop = asyncio.get_running_loop()
        done, waiting = await asyncio.wait(tasks, timeout=LONG_S / 2)
        assert not waiting, loop.time()
        for task in done:
            if not task.cancelled():
                await task
        assert not any(hold.size for hold in holds)
        assert len(await asyncio.gather(*(held(budget, c, 25) for c in "wxyz"))) == 4

    run_leaping(run())
