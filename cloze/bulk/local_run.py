"""A bulk run in this process, without Ray."""

import asyncio
from collections.abc import Iterable, Sequence

from cloze.bulk.errors import BulkError
from cloze.bulk.job import BulkJob
from cloze.bulk.plan import Shard
from cloze.bulk.run_folder import ShardReport
from cloze.bulk.work import BulkWorker, Progress

_SHARDS_AT_ONCE = 2
"""Shards that run at once, so that the engine has work while a shard ends."""


def run_locally(job: BulkJob, shards: Sequence[Shard], on_rows: Progress) -> list[ShardReport]:
    """Write the results of shards, and return their reports.

    Args:
        shards: the shards that are not complete.

    Raises:
        BulkError: the run cannot go on.
    """
    worker = BulkWorker(job, on_rows)
    try:
        return asyncio.run(_run(worker, shards))
    except BaseExceptionGroup as errors:
        known, other = errors.split(BulkError)
        if known is None or other is not None:
            raise
        raise _first(known) from None
    finally:
        worker.close()


def _first(errors: BaseExceptionGroup[BulkError]) -> BulkError:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def _run(worker: BulkWorker, shards: Iterable[Shard]) -> list[ShardReport]:
    reports: list[ShardReport] = []
    waiting = iter(shards)

    async def write_shards() -> None:
        for shard in waiting:
            reports.append(await worker.write_shard(shard))  # noqa: PERF401 - a shared iterator

    async with asyncio.TaskGroup() as group:
        for _ in range(_SHARDS_AT_ONCE):
            group.create_task(write_shards())
    return reports
