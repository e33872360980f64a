"""How many functions run on threads at once, and what an error of a function keeps."""

import asyncio
import gc
import threading
import weakref
from contextlib import suppress

from cloze.service.threads import bound_threads, run_on_thread


def test_no_more_functions_run_at_once_than_were_allowed() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def work(release: threading.Event) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        release.wait(5)
        with lock:
            running -= 1

    async def run() -> None:
        bound_threads(3)
        release = threading.Event()
        tasks = [asyncio.create_task(run_on_thread(work, release)) for _ in range(8)]
        while running < 3:
            await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert most == 3


class Body:
    """What a function on a thread gets."""


def test_an_error_on_a_thread_frees_what_the_function_had() -> None:
    """Without a garbage collection, which may come after many bodies of megabytes."""

    def fail(body: Body) -> None:
        raise ValueError(type(body).__name__)

    async def run() -> bool:
        body = Body()
        kept = weakref.ref(body)
        with suppress(ValueError):
            await run_on_thread(fail, body)
        del body
        await run_on_thread(len, "the thread's next work")
        return kept() is None

    gc.disable()
    try:
        assert asyncio.run(run())
    finally:
        gc.enable()
