"""How fast batches run on an engine, by as many workers as a server has, nothing before it and nothing behind."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from model_store.batch import Encoding
from service.core import Engine


def rounds_per_s(play: Callable[[], object], seconds: float) -> float:
    """How often ``play`` is done in a second: whole rounds, one at least, for about so many seconds."""
    rounds, started = 0, time.perf_counter()
    while not rounds or time.perf_counter() - started < seconds:
        play()
        rounds += 1
    return rounds / (time.perf_counter() - started)


def run_all(engine: Engine, batches: Sequence[Sequence[Encoding]], workers: int) -> None:
    """Every batch once, the last first, by so many threads.

    Raises:
        Exception: what the engine raised.
    """
    left = list(batches)
    lock = threading.Lock()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                with lock:
                    if not left or failed:
                        return
                    batch = left.pop()
                engine.run(batch)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def cut(queries: Sequence[Encoding], budget: int) -> list[list[Encoding]]:
    """Batches of at most so many tokens, or of one query, in the order of the queries."""
    batches: list[list[Encoding]] = []
    tokens = budget
    for query in queries:
        if tokens + len(query) > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(query)
        tokens += len(query)
    return batches


def batches_for(engine: Engine, queries: Sequence[Encoding], budget: int) -> list[list[Encoding]]:
    """`cut` as the engine takes them: in their order where it mixes lengths, else those of a length together, ascending."""
    if engine.supports_varlen:
        return cut(queries, budget)
    groups: dict[int, list[Encoding]] = defaultdict(list)
    for query in queries:
        groups[len(query)].append(query)
    return [batch for _, group in sorted(groups.items()) for batch in cut(group, budget)]
