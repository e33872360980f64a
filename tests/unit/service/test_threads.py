"""How many functions run on threads at once."""

import asyncio
import threading

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
