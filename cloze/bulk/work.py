"""The worker of a bulk run: turns shards of rows into files of results, through the pipeline.

The local run and each worker of a Ray cluster use this module.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from cloze.bulk.chunks import Chunk
from cloze.bulk.errors import BulkError
from cloze.bulk.job import BulkJob, base_and_digest, open_model
from cloze.bulk.plan import Shard
from cloze.bulk.run_folder import RunFolder, ShardReport
from cloze.bulk.sources import ShardReader
from cloze.bulk.writers import RowResult, open_writer
from cloze.model_store import StoreError
from cloze.service.core import ServedRequest
from cloze.service.errors import EngineFailed, Location, RequestError, ServiceError, StartupError
from cloze.service.models.pipeline import Pipeline, task_limits
from cloze.service.models.served_models import LocalModels, ServedModel, close_models
from cloze.service.tasks.task import INPUTS

_REQUEST_ROWS = 64
"""Most rows per request to the pipeline. A request with a wrong row runs again row by row."""

_REQUEST_CHARACTERS = 65_536
"""Most characters per request of several rows."""

_CHUNKS_IN_FLIGHT = 16
"""Most chunks of a shard that are read and not written: enough texts for batches of one length."""

_CHARACTERS_IN_FLIGHT = 4 * 2**20
"""Most characters of several chunks that are read and not written, for the memory."""

_FILE_S = 20.0
"""Seconds after which the written rows of a shard become a file, which the next run keeps."""

Progress = Callable[[int], None]
"""Called with a number of rows that have been written."""


class BulkWorker:
    """Turns shards into files of results with one engine.

    Raises:
        BulkError: the model cannot be opened, or is not the one of the job.
    """

    def __init__(self, job: BulkJob, on_rows: Progress = lambda _: None) -> None:
        self._job, self._on_rows = job, on_rows
        self._folder = RunFolder(job.output, job.options.format)
        self._models, self._pipeline = _open_pipeline(job)
        task = job.options.task
        self._task = task
        # The usage has the tokens of each row.
        parameters: dict[str, Any] = {**job.options.parameters, "return_usage": True}
        self._parameters = task.task.parameters(**parameters)
        self._reader = ShardReader(job.plan, job.options.columns, job.kept)
        self._reading = asyncio.Lock()

    def close(self) -> None:
        """End the threads of the engine."""
        close_models(self._models)

    async def write_shard(self, shard: Shard) -> ShardReport:
        """Write the results of a shard, unless they are complete.

        Calls may run at once: the second one reads while the first one waits for its last results.

        Returns:
            The report of the shard.

        Raises:
            BulkError: the input cannot be read, the output cannot be written, or the engine is
                dead.
        """
        if self._folder.is_complete(shard):
            return self._folder.report(shard)
        try:
            precision = str(self._pipeline.model.precision())
            report = ShardReport(shard.number, 0, 0, 0, 0, precision, files=0)
            report = self._folder.begun(shard) or report
            files = _ShardFiles(self._folder, self._job, shard, report)
            try:
                await self._write_rows(shard, files, report)
                await asyncio.to_thread(files.complete, is_last=True)
            finally:
                await asyncio.to_thread(files.discard)
            return report
        except OSError as error:
            raise BulkError(
                f"cannot write to {self._folder.path}: {error.strerror or error}"
            ) from None

    async def _write_rows(self, shard: Shard, files: "_ShardFiles", report: ShardReport) -> None:
        """Read, answer and write the rows of a shard that are not written, in order."""
        pending: deque[tuple[Chunk, asyncio.Task[list[RowResult]]]] = deque()
        in_flight = 0

        async def write_first() -> int:
            chunk, answers = pending[0]
            results = await answers
            pending.popleft()
            await asyncio.to_thread(files.write, chunk, results)
            self._on_rows(len(chunk))
            return chunk.characters

        chunks = self._reader.read(shard, report.rows)
        try:
            async with self._reading:
                while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                    in_flight += chunk.characters
                    while pending and (
                        len(pending) >= _CHUNKS_IN_FLIGHT or in_flight > _CHARACTERS_IN_FLIGHT
                    ):
                        in_flight -= await write_first()
                    answers = asyncio.create_task(self._answer(chunk, report))
                    pending.append((chunk, answers))
            while pending:
                await write_first()
        finally:
            for _, answers in pending:
                answers.cancel()
            await asyncio.gather(*(answers for _, answers in pending), return_exceptions=True)

    async def _answer(self, chunk: Chunk, report: ShardReport) -> list[RowResult]:
        """Return the results of a chunk, in the order of its rows."""
        results: list[RowResult | None] = [None] * len(chunk)
        rows: list[int] = []
        for index, (texts, error) in enumerate(zip(chunk.inputs, chunk.errors, strict=True)):
            problem = error or _problem(texts, self._job.options.columns)
            if problem is None:
                rows.append(index)
            else:
                results[index] = RowResult(None, None, None, problem)

        async def answer(indices: Sequence[int]) -> None:
            texts: list[Any] = [chunk.inputs[index] for index in indices]
            answered = await self._answer_rows(texts, report)
            for index, result in zip(indices, answered, strict=True):
                results[index] = result

        await asyncio.gather(*(answer(indices) for indices in _requests(rows, chunk)))
        return [result for result in results if result is not None]

    async def _answer_rows(
        self, texts: Sequence[Sequence[str]], report: ShardReport
    ) -> list[RowResult]:
        """Return the results of rows that are one request, or one each if a row is wrong."""
        inputs = [self._task.to_input(row) for row in texts]
        request = ServedRequest(body_bytes=sum(len(text) for row in texts for text in row))
        try:
            value = await self._pipeline.run(self._task.task, inputs, self._parameters, request)
        except (RequestError, EngineFailed) as error:
            if len(texts) > 1:
                singles = await asyncio.gather(*(self._answer_rows([row], report) for row in texts))
                return [answer for single in singles for answer in single]
            message = _with_columns(error, self._job.options.columns)
            return [RowResult(None, None, None, message)]
        except ServiceError as error:
            raise BulkError(f"{error}; run the command again to continue") from None
        report.tokens += request.tokens
        report.embedding_space = request.embedding_space or ""
        assert request.usage is not None
        values = self._task.to_values(value)
        return [
            RowResult(value, usage.used, usage.used < usage.tokens, None)
            for value, usage in zip(values, request.usage, strict=True)
        ]


class _ShardFiles:
    """The files of a shard: one, and one more for each `_FILE_S` that the shard takes longer.

    Args:
        report: counts the rows that are written.
    """

    def __init__(self, folder: RunFolder, job: BulkJob, shard: Shard, report: ShardReport) -> None:
        self._folder, self._job, self._shard, self._report = folder, job, shard, report
        self._lock = Lock()  # the thread of a write goes on if the run is cancelled
        self._is_discarded = False
        self._open()

    def _open(self) -> None:
        self._unfinished = self._folder.unfinished(self._shard)
        self._writer = open_writer(self._unfinished, self._job.options.format, self._job.schema)
        self._is_open, self._began = True, time.monotonic()

    def write(self, chunk: Chunk, results: Sequence[RowResult]) -> None:
        """Write rows, and begin a new file if it is time."""
        with self._lock:
            if self._is_discarded:
                return
            self._writer.write(chunk, results)
            _count(self._report, self._shard.first_row, results)
            is_last = self._report.rows == self._shard.rows
            if not is_last and time.monotonic() - self._began >= _FILE_S:
                self.complete(is_last=False)
                self._open()

    def complete(self, *, is_last: bool) -> None:
        """Complete the file."""
        self._close()
        self._report.files += 1
        self._folder.complete(self._unfinished, self._shard, self._report, is_last=is_last)

    def discard(self) -> None:
        """Remove the file, unless it is complete."""
        with self._lock:
            self._is_discarded = True
            try:
                self._close()
            finally:
                with suppress(OSError):
                    self._unfinished.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            space = self._report.embedding_space
            self._writer.close({"embedding_space": space} if space else {})


def _count(report: ShardReport, first_row: int, results: Sequence[RowResult]) -> None:
    """Count the results of the next rows of a shard that begins with the row `first_row`."""
    for result in results:
        report.rows += 1
        report.truncated += bool(result.truncated)
        if result.error is not None:
            report.errors += 1
            if not report.first_error:
                report.first_error = f"row {first_row + report.rows}: {result.error}"


def _open_pipeline(job: BulkJob) -> tuple[list[ServedModel], Pipeline]:
    """Return the models of a job, and the pipeline of the last one, which answers."""
    try:
        bundles = open_model(job.settings, job.model)
        *_, bundle = bundles
        if base_and_digest(bundle) != (job.model, job.digest):
            raise BulkError(f"the bundle {job.model} is not the one that the run began with")
        models = LocalModels(job.settings).open(bundles)
        return models, Pipeline(models[-1], task_limits(job.settings, bundle.manifest))
    except (StoreError, StartupError) as error:
        raise BulkError(str(error)) from None


def _problem(texts: Sequence[object], columns: Sequence[str]) -> str | None:
    """Return why a row cannot be answered, as far as that shows without the model."""
    for text, column in zip(texts, columns, strict=True):
        if text is None:
            return f"{column} is missing"
        if isinstance(text, bytes):
            return f"{column} is not UTF-8"
        if not isinstance(text, str):
            return f"{column} is not a string"
        if not text:
            return f"{column} is empty"
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"{column} is not UTF-8"
    return None


def _requests(rows: Sequence[int], chunk: Chunk) -> list[list[int]]:
    """Divide rows of a chunk into requests."""
    requests: list[list[int]] = []
    room = 0
    for index in rows:
        characters = sum(len(str(text)) for text in chunk.inputs[index])
        if not requests or len(requests[-1]) == _REQUEST_ROWS or characters > room:
            requests.append([])
            room = _REQUEST_CHARACTERS
        requests[-1].append(index)
        room -= characters
    return requests


def _with_columns(error: RequestError | EngineFailed, columns: Sequence[str]) -> str:
    """Return the message of an error of the pipeline, with the names of the columns."""
    if not isinstance(error, RequestError) or error.at is None or error.at[:1] != INPUTS:
        return str(error)
    fields = dict(zip(("question", "context"), columns, strict=False))
    row = columns[0] if len(columns) == 1 else "the row"
    named = [fields[part] for part in error.at if part in fields]
    return str(error.moved(Location(named or [row])))
