"""The bodies of large requests are bounded: further ones wait, in order, or are refused."""

import asyncio

import pytest

from cloze.service.core import Overloaded
from cloze.service.http.memory_limit import MemoryLimit

KB = 1024


def test_bodies_wait_in_the_order_of_their_arrival() -> None:
    async def play() -> None:
        memory = MemoryLimit("bodies", 300 * KB, 5.0)
        first, second = await memory.hold(200 * KB), await memory.hold(100 * KB)
        order: list[int] = []

        async def hold(size: int) -> int:
            held = await memory.hold(size)
            order.append(size)
            return held

        large, small = (asyncio.create_task(hold(size * KB)) for size in (250, 70))
        await asyncio.sleep(0.01)
        memory.release(second)
        await asyncio.sleep(0.01)
        assert not order, "the smaller one would fit, but came later"
        memory.release(first)
        memory.release(await large)
        await small
        assert order == [250 * KB, 70 * KB]

    asyncio.run(play())


def test_small_bodies_never_wait_and_the_largest_runs_alone() -> None:
    async def play() -> None:
        memory = MemoryLimit("bodies", 100 * KB, 0.0)
        held = await memory.hold(900 * KB)
        assert held == 100 * KB
        assert await memory.hold(64 * KB) == 0

    asyncio.run(play())


def test_who_waits_for_too_long_is_refused_and_holds_nothing() -> None:
    async def play() -> None:
        memory = MemoryLimit("bodies", 100 * KB, 0.02)
        held = await memory.hold(80 * KB)
        with pytest.raises(Overloaded, match=r"hold 81920 bytes; with this one's 92160 .* 102400"):
            await memory.hold(90 * KB)
        gone = asyncio.create_task(memory.hold(90 * KB))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        memory.release(held)
        assert await memory.hold(100 * KB) == 100 * KB

    asyncio.run(play())
