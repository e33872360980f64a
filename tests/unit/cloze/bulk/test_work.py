"""The worker of a bulk run, with an engine that adds up the ids of a text instead of a model."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloze.bulk import chunks, work
from cloze.bulk.chunks import Chunk
from cloze.bulk.errors import BulkError
from cloze.bulk.job import BulkJob, JobOptions
from cloze.bulk.local_run import run_locally
from cloze.bulk.plan import FileFormat, Shard
from cloze.bulk.run_folder import RunFolder, ShardReport
from cloze.bulk.sources import input_files, make_plan
from cloze.bulk.work import BulkWorker
from cloze.model_store.batch import Encoding
from cloze.service.models.pipeline import Pipeline, task_limits
from cloze.service.models.served_models import LocalModels, ServedModel
from cloze.service.settings import Settings
from tests.support.fake_engine import FakeEngine
from tests.support.task_model import CLS, ID, SEP, bundle

Rows = list[dict[str, Any]]
SETTINGS = Settings(max_batch_tokens=1000, max_queue_wait_ms=60_000)


def ids_sum(text: str) -> int:
    return CLS + SEP + sum(ID[word] for word in text.split())


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Return the engine of all workers of a test."""
    fake = FakeEngine()
    folder = tmp_path / "bundle"
    folder.mkdir()
    opened = bundle(folder)

    def open_pipeline(job: BulkJob) -> tuple[list[ServedModel], Pipeline]:
        models = LocalModels(job.settings, lambda *_: fake).open([opened])
        return models, Pipeline(models[0], task_limits(job.settings, opened.manifest))

    monkeypatch.setattr(work, "_open_pipeline", open_pipeline)
    return fake


def job_of(folder: Path, rows: list[Any], shard_rows: int = 100, **changes: Any) -> BulkJob:
    """Return a job whose input are JSON lines of the rows."""
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file_format, files = input_files([source])
    options: dict[str, Any] = {
        "command": "embed", "columns": ("text",), "parameters": {"normalize": False},
        "id_column": None, "prefix": "", "format": FileFormat.JSONL, "shard_rows": shard_rows,
    }  # fmt: skip
    plan = make_plan(file_format, files, shard_rows, lambda _: None)
    output = folder / "out"
    job = BulkJob(JobOptions(**(options | changes)), "tiny@3", "d" * 64, SETTINGS, plan, output)
    with RunFolder(output, job.options.format).locked():
        pass
    return job


def written(job: BulkJob, number: int = 0) -> Rows:
    file = job.output / f"part-{number:05d}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def texts(*words: str) -> Rows:
    return [{"text": word} for word in words]


def test_the_rows_of_a_shard_are_answered_in_their_order(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 3)
    words = ["a", "the red door", "b", "moon", "c d", "sun", "e"]
    job, seen = job_of(tmp_path, texts(*words), shard_rows=7), []
    [report] = run_locally(job, job.plan.shards, seen.append)
    rows = written(job)
    assert [row["text"] for row in rows] == words
    assert [row["embedding"] for row in rows] == [[ids_sum(word)] for word in words]
    assert [row["tokens"] for row in rows] == [2 + len(word.split()) for word in words]
    assert {row["truncated"] for row in rows} == {False}
    assert {row["error"] for row in rows} == {None}
    assert report == ShardReport(0, 7, 0, 0, 2 * 7 + 10, "fp32", "", report.embedding_space)
    assert len(report.embedding_space) == 16
    assert seen == [3, 3, 1]
    assert RunFolder(job.output, FileFormat.JSONL).report(job.plan.shards[0]) == report
    assert not list(job.output.glob("_part-*"))
    assert engine.batches


def test_a_wrong_row_has_an_error_and_the_others_of_its_request_have_results(
    tmp_path: Path, engine: FakeEngine
) -> None:
    rows: list[Any] = [*texts("a", "a b c d e f g h i", ""), [1], {"text": 5}, *texts("b")]
    job = job_of(tmp_path, rows, parameters={"long_text": "error", "normalize": False})
    [report] = run_locally(job, job.plan.shards, lambda _: None)
    assert [row["error"] for row in written(job)] == [
        None,
        "text has 11 tokens; the model reads 10, and long_text is error",
        "text is empty",
        "the line is not a JSON object",
        "text is not a string",
        None,
    ]
    assert [row["embedding"] for row in written(job)] == [
        [ids_sum("a")], None, None, None, None, [ids_sum("b")],
    ]  # fmt: skip
    assert (report.rows, report.errors, report.tokens) == (6, 4, 6)
    assert report.first_error.startswith("row 2: text has 11 tokens")
    assert engine.batches


def test_a_row_that_the_engine_cannot_run_has_an_error(tmp_path: Path, engine: FakeEngine) -> None:
    def is_red(encoding: Encoding) -> bool:
        return ID["red"] in encoding.input_ids.tolist()

    engine.poison = is_red
    job = job_of(tmp_path, texts("a", "red", "b"))
    [report] = run_locally(job, job.plan.shards, lambda _: None)
    good, bad, other = written(job)
    assert (good["error"], other["error"]) == (None, None)
    assert bad["error"] is not None
    assert bad["embedding"] is bad["tokens"] is bad["truncated"] is None
    assert (report.errors, report.tokens) == (1, 6)


def test_a_dead_engine_ends_the_run_in_one_line(tmp_path: Path, engine: FakeEngine) -> None:
    engine.poison = lambda _: True
    engine.broken = True
    job = job_of(tmp_path, texts("a", "b"))
    with pytest.raises(BulkError, match=r"; run the command again to continue$"):
        run_locally(job, job.plan.shards, lambda _: None)
    assert sorted(path.name for path in job.output.iterdir()) == ["_reports"]


def test_a_complete_shard_is_not_written_again(tmp_path: Path, engine: FakeEngine) -> None:
    job = job_of(tmp_path, texts("a", "b", "c"), shard_rows=2)
    reports = run_locally(job, job.plan.shards, lambda _: None)
    assert sorted(report.shard for report in reports) == [0, 1]
    first = job.output / "part-00000.jsonl"
    first.write_text("kept")
    engine.batches.clear()
    again = run_locally(job, job.plan.shards, lambda _: None)
    assert sorted(again, key=lambda one: one.shard) == sorted(reports, key=lambda one: one.shard)
    assert first.read_text() == "kept"
    assert engine.batches == []


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path, engine: FakeEngine) -> None:
    job = job_of(tmp_path, texts("a"))
    shutil.rmtree(job.output / "_reports")
    with pytest.raises(BulkError, match=r"cannot write to .*/out: No such file"):
        run_locally(job, job.plan.shards, lambda _: None)
    assert list(job.output.iterdir()) == []  # without results that are not complete
    job.output.rmdir()
    with pytest.raises(BulkError, match=r"cannot write to .*/out: No such file"):
        run_locally(job, job.plan.shards, lambda _: None)
    assert engine.batches


def test_an_input_that_has_changed_ends_the_run(tmp_path: Path, engine: FakeEngine) -> None:
    job = job_of(tmp_path, texts("a"))
    (tmp_path / "in.jsonl").write_text('{"text": "b"}\n{"text": "c"}\n')
    with pytest.raises(BulkError, match=r"in.jsonl has changed since the run began"):
        run_locally(job, job.plan.shards, lambda _: None)
    assert engine.batches == []
    assert not list(job.output.glob("*part-*"))


def test_an_error_that_is_not_expected_is_raised_as_it_is(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while other chunks wait for their results."""
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 1)

    def fail(_: int) -> None:
        engine.gate.clear()
        raise KeyError("a fault")

    job = job_of(tmp_path, texts(*"abcdefgh"))
    with pytest.raises(BaseExceptionGroup) as error:
        try:
            run_locally(job, job.plan.shards, fail)
        finally:
            engine.gate.set()
    assert error.group_contains(KeyError)
    assert engine.batches


def most_unwritten(job: BulkJob) -> tuple[int, int]:
    """Return the most chunks, and their most characters, that are read and not written."""
    read: list[Chunk] = []
    most = [0, 0]
    written = [0]

    def on_rows(rows: int) -> None:
        written[0] += 1
        assert rows

    worker = BulkWorker(job, on_rows)
    original = worker._reader.read

    def counted(shard: Shard, skipped: int) -> Iterator[Chunk]:
        for chunk in original(shard, skipped):
            read.append(chunk)
            waiting = read[written[0] :]
            most[0] = max(most[0], len(waiting))
            most[1] = max(most[1], sum(one.characters for one in waiting))
            yield chunk

    worker._reader.read = counted  # type: ignore[method-assign]
    try:
        asyncio.run(worker.write_shard(job.plan.shards[0]))
    finally:
        worker.close()
    assert written[0] == len(read)
    return most[0], most[1]


def test_few_chunks_are_read_and_not_written(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 1)
    monkeypatch.setattr(work, "_CHUNKS_IN_FLIGHT", 3)
    job = job_of(tmp_path, texts(*"abcdefgh"))
    assert most_unwritten(job)[0] == 4  # one more is read before the first is written
    assert len(written(job)) == 8
    assert engine.batches


def test_few_characters_are_read_and_not_written(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 1)
    monkeypatch.setattr(work, "_CHARACTERS_IN_FLIGHT", 30)
    job = job_of(tmp_path, texts(*["a b c d e "] * 8))  # 10 characters each
    assert most_unwritten(job) == (4, 40)
    assert engine.batches


def test_a_local_run_has_two_shards_at_once(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one shard at a time, the engine would have no work while a shard ends."""
    engine.gate.clear()
    job = job_of(tmp_path, texts(*"abcdef"), shard_rows=2)
    opened: list[int] = []

    class Folder(RunFolder):
        """Lets the engine run when two shards have begun."""

        def unfinished(self, shard: Shard) -> Path:
            opened.append(shard.number)
            if len(opened) == 2:
                engine.gate.set()
            return super().unfinished(shard)

    monkeypatch.setattr(work, "RunFolder", Folder)
    run_locally(job, job.plan.shards, lambda _: None)
    assert sorted(opened) == [0, 1, 2]
