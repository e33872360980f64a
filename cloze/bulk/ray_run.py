"""A bulk run on a Ray cluster, by Ray Data.

Ray Data passes the numbers of shards to a pool of actors, and restarts an actor that dies. The rows
do not pass through Ray: an actor reads a shard and writes its results in folders that all machines
share. So a run that was killed continues with or without Ray, on any number of machines.
"""

import asyncio
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import ray
import ray.data
import ray.exceptions

from cloze.bulk.errors import BulkError
from cloze.bulk.job import BulkJob
from cloze.bulk.plan import Shard
from cloze.bulk.run_folder import ShardReport
from cloze.bulk.work import BulkWorker, Progress
from cloze.model_store.error_lines import first_line
from cloze.service.core import Device

_MOST_BLOCKS = 4096
"""Most blocks of shard numbers; with more shards, a block has several."""

_CONNECT_TIMEOUT_S = 10.0

_MOST_RETRIES = 10
"""Most repetitions of a shard whose worker dies. Ray's default is to repeat it for ever."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Where and with what a run's workers run.

    Attributes:
        address: address of the cluster, or "local" for a new one on this machine; None: the
            cluster of this job or machine, or else a new one.
        workers: number of workers; 0: as many as the cluster has room for when the run begins.
    """

    address: str | None = None
    workers: int = 0
    worker_cpus: int = 1


def run_on_ray(
    job: BulkJob, shards: Sequence[Shard], on_rows: Progress, options: RayOptions
) -> list[ShardReport]:
    """Write the results of shards, and return their reports; see `run_locally`."""
    # Ray prints what happens to its processes to standard output, which is for the summary.
    with redirect_stdout(sys.stderr):
        return _run(job, shards, on_rows, options)


def _run(
    job: BulkJob, shards: Sequence[Shard], on_rows: Progress, options: RayOptions
) -> list[ShardReport]:
    cpus = options.worker_cpus
    settings = job.settings.model_copy(update={"workers": job.settings.workers or cpus})
    _connect(options.address)
    try:
        is_cuda = settings.device is Device.CUDA
        workers = options.workers or _room(is_cuda, cpus)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        numbers = ray.data.from_items(
            [{"shard": shard.number} for shard in shards],
            override_num_blocks=max(1, min(len(shards), _MOST_BLOCKS)),
        )
        reports = numbers.map_batches(
            ShardWriters,
            fn_constructor_args=(replace(job, settings=settings),),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers, max(1, len(shards)))),
            num_cpus=cpus,
            num_gpus=1 if is_cuda else None,
            max_task_retries=_MOST_RETRIES,
        )
        written = []
        for row in reports.iter_rows():
            written.append(ShardReport(**json.loads(row["report"])))
            on_rows(written[-1].rows)
        return written
    except ray.exceptions.RayError as error:
        raise BulkError(_cause(error)) from None
    finally:
        ray.shutdown()


def _connect(address: str | None) -> None:
    """Connect to a cluster, or start one; Ray's own reports go to its log files."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # as onnxruntime's telemetry is off
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        _check_reachable(address or os.environ.get("RAY_ADDRESS", ""))
        ray.init(address, logging_level="error", log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise BulkError(f"no Ray cluster at {address or 'hand'}: {first_line(error)}") from None
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _check_reachable(address: str) -> None:
    """Raise `OSError` unless something listens at an address; Ray tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


def _room(is_cuda: bool, cpus: int) -> int:
    """Return how many workers the cluster has room for."""
    resources = ray.cluster_resources()
    rooms = [int(resources.get("CPU", 0)) // cpus]
    if is_cuda:
        rooms.append(int(resources.get("GPU", 0)))
    if (room := min(rooms)) < 1:
        raise BulkError(
            f"the Ray cluster has {resources.get('CPU', 0):g} cores and "
            f"{resources.get('GPU', 0):g} GPUs now; give --ray-workers if it grows on demand"
        )
    return room


def _cause(error: Exception) -> str:
    """Return the error of a worker, or else the first line of Ray's report.

    If an actor does not start, Ray passes on only the text of the worker's error.
    """
    report = re.sub(r"\x1b\[\d+m", "", str(error))
    own = re.findall(rf"{BulkError.__name__}: (.+)", report)
    return own[-1] if own else f"Ray: {first_line(Exception(report))}"


class ShardWriters:
    """An actor of Ray Data with a worker."""

    def __init__(self, job: BulkJob) -> None:
        self._shards = job.plan.shards
        self._worker = BulkWorker(job)
        self._runner = asyncio.Runner()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Write the results of shards.

        Returns:
            The reports as JSON, in the column ``report``.
        """
        reports = [
            self._runner.run(self._worker.write_shard(self._shards[number]))
            for number in batch["shard"].tolist()
        ]
        return {"report": np.array([json.dumps(asdict(report)) for report in reports])}
