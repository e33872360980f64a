"""Runs of bulk jobs: which model, which shards, and what is refused before any work."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cloze.bulk.errors import BulkError
from cloze.bulk.job import BulkJob, JobOptions
from cloze.bulk.model_choice import check_parameters, choose_bundle
from cloze.bulk.plan import FileFormat, Shard
from cloze.bulk.run import Watcher, run_job
from cloze.bulk.run_folder import RunFolder, ShardReport
from cloze.bulk.summary import Summary
from cloze.bulk.tasks import BULK_TASKS
from cloze.bulk.work import Progress, _open_pipeline
from cloze.service.settings import Settings
from tests.support.crafted import read_body, seal
from tests.support.task_model import bundle, manifest


def stored(root: Path, name: str, *tasks: str, version: int = 1, year: int = 2026) -> None:
    """Put a bundle into a store; its graph is no graph."""
    folder = root / name / str(version)
    folder.mkdir(parents=True)
    kept = tasks or manifest().tasks
    bundle(folder)
    for file in ("g.onnx", "golden.json"):
        (folder / file).write_text(file)
    described = manifest(
        name=name, version=version, tasks=kept, created=f"{year}-01-01T00:00:00Z",
        embedding=manifest().embedding if "embed" in kept else None, heads={},
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(described.to_bytes())
    seal(folder, read_body(folder))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store of three models: of all tasks, and of one task each."""
    root = tmp_path / "store"
    stored(root, "all", *(task for task in manifest().tasks if "classification" not in task))
    stored(root, "masks", "fill-mask", year=2025)
    stored(root, "answers", "qa", year=2024)
    return root


def silent(_: str) -> None:
    raise AssertionError("nothing is to be reported")


def settings(store: Path, **changes: Any) -> Settings:
    return Settings(model_store=store, **changes)


def chosen(store: Path, task: str, **changes: Any) -> str:
    return choose_bundle(settings(store, **changes), BULK_TASKS[task], silent).manifest.reference


def test_the_model_is_the_first_that_serves_the_task(store: Path) -> None:
    assert chosen(store, "embed") == "all@1"
    assert chosen(store, "fill-mask") == "masks@1"  # older than the one of all tasks
    assert chosen(store, "qa") == "answers@1"
    assert chosen(store, "qa", model=("masks", "all")) == "all@1"
    stored(store, "answers", "qa", version=2, year=2027)
    assert chosen(store, "qa") == "answers@2"
    assert chosen(store, "qa", model=("answers@1",)) == "answers@1"


def test_the_default_of_a_task_comes_first(store: Path) -> None:
    assert chosen(store, "qa", default=("qa=all",)) == "all@1"
    assert chosen(store, "qa", default=("fill-mask=all",)) == "answers@1"


def test_models_that_cannot_be_chosen(store: Path, tmp_path: Path) -> None:
    for task, changes, message in (
        ("qa", {"model": ("masks",)}, "model masks cannot do qa; it does fill-mask"),
        ("embed", {"model": ("masks", "answers")}, f"no model in {store} can do embed"),
        ("classify", {}, f"no model in {store} can do text-classification"),
        ("qa", {"model": ("none",)}, "no bundle named 'none'"),
    ):
        with pytest.raises(BulkError, match=message):
            chosen(store, task, **changes)
    with pytest.raises(BulkError, match=r"the model store .*empty has no bundle"):
        chosen(tmp_path / "empty", "qa")
    (store / "answers/1/g.onnx").write_text("other")
    with pytest.raises(BulkError, match="answers@1"):
        chosen(store, "qa")


@pytest.mark.parametrize(
    ("task", "parameters", "message"),
    [
        ("embed", {"dimensions": 5}, "dimensions must be between 1 and 4, got 5"),
        ("embed", {"spans": [["a", 2]]}, "spans.0.0: input should be a valid integer"),
        ("qa", {"max_seq_len": 7}, "max_seq_len must be between 8 and 12"),
    ],
)
def test_parameters_are_checked_once(
    store: Path, task: str, parameters: dict[str, Any], message: str
) -> None:
    options = settings(store)
    opened = choose_bundle(options, BULK_TASKS[task], silent)
    check_parameters(options, opened, BULK_TASKS[task], {})
    with pytest.raises(BulkError, match=message):
        check_parameters(options, opened, BULK_TASKS[task], parameters)


class Runner:
    """Runs jobs whose shards are written by a function instead of a model.

    `shards` has numbers of shards per job; `planned` and `rows` have what the watcher heard.
    """

    def __init__(self, folder: Path, store: Path) -> None:
        self._folder, self._store = folder, store
        self.jobs: list[BulkJob] = []
        self.shards: list[list[int]] = []
        self.planned: list[tuple[int, int]] = []
        self.rows: list[int] = []
        self.most = 100

    def run(self, *paths: Path, model_store: Path | None = None, **changes: Any) -> Summary:
        values: dict[str, Any] = {
            "command": "embed", "columns": ("text",), "parameters": {}, "id_column": None,
            "prefix": "", "format": FileFormat.JSONL, "shard_rows": 2,
        }  # fmt: skip
        output = changes.pop("output", self._folder / "out")
        watcher = Watcher(silent, lambda *rows: self.planned.append(rows), self.rows.append)
        options = JobOptions(**(values | changes))
        chosen = settings(model_store or self._store)
        return run_job(paths, output, options, chosen, self._run_shards, watcher)

    def _run_shards(
        self, job: BulkJob, shards: Sequence[Shard], on_rows: Progress
    ) -> list[ShardReport]:
        folder, reports = RunFolder(job.output, job.options.format), []
        self.jobs.append(job)
        self.shards.append([shard.number for shard in shards])
        for shard in shards[: self.most]:
            unfinished = folder.unfinished(shard)
            unfinished.write_text("x")
            report = ShardReport(shard.number, shard.rows, 1, 0, 10, "fp32", "row 1: no")
            folder.complete(unfinished, shard, report)
            on_rows(shard.rows)
            reports.append(report)
        return reports


@pytest.fixture
def runner(tmp_path: Path, store: Path) -> Runner:
    return Runner(tmp_path, store)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return an input of five rows."""
    file = tmp_path / "in" / "a.csv"
    file.parent.mkdir()
    file.write_text("text\na\nb\nc\nd\ne\n")
    return file


def test_a_run_writes_all_shards_and_then_none(runner: Runner, source: Path) -> None:
    summary = runner.run(source.parent)
    assert (summary.rows, summary.errors, summary.files, summary.resumed_files) == (5, 3, 3, 0)
    assert summary.seconds < 60
    assert runner.rows == [2, 2, 1]
    job = runner.jobs[0]
    assert (job.model, job.output.name) == ("all@1", "out")
    again = runner.run(source.parent)
    assert (again.rows, again.errors, again.files, again.resumed_files) == (5, 3, 3, 3)
    assert again.texts_per_s == 0
    assert runner.shards == [[0, 1, 2]]  # without shards, no worker begins
    assert runner.planned == [(5, 0), (5, 5)]


def test_a_run_continues_with_what_is_left(runner: Runner, source: Path) -> None:
    runner.most = 1
    assert runner.run(source).rows == 2
    runner.most = 100
    summary = runner.run(source)
    assert (summary.rows, summary.files, summary.resumed_files) == (5, 3, 1)
    assert runner.shards == [[0, 1, 2], [1, 2]]
    assert runner.planned == [(5, 0), (5, 2)]


def test_the_recorded_plan_is_used_again(runner: Runner, source: Path) -> None:
    runner.run(source)
    plan = runner.jobs[0].plan
    (runner.jobs[0].output / "part-00002.jsonl").unlink()
    status = source.stat()
    source.write_bytes(b"text\na\nb\nc\nd\n\xff\n")  # the same size
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    runner.run(source)
    assert runner.jobs[1].plan == plan
    assert runner.shards[1] == [2]


def test_what_is_refused_before_any_work(runner: Runner, source: Path, tmp_path: Path) -> None:
    for output in (source.parent, source.parent / "out"):
        with pytest.raises(BulkError, match=r"the output .* lies in the input"):
            runner.run(source.parent, output=output)
    with pytest.raises(BulkError, match="no column 'other'"):
        runner.run(source, columns=("other",))
    with pytest.raises(BulkError, match="dimensions must be between"):
        runner.run(source, parameters={"dimensions": 9})
    with pytest.raises(BulkError, match="the input has a column 'embedding', as the results have"):
        runner.run(renamed(source, "embedding"), columns=("embedding",))
    full = tmp_path / "full"
    full.mkdir()
    (full / "other").write_text("x")
    with pytest.raises(BulkError, match="has other content"):
        runner.run(source, output=full)
    assert not (tmp_path / "out").exists()
    assert runner.jobs == []
    # One file of a folder may have its results beside it.
    assert runner.run(source, output=source.parent / "out").rows == 5


def renamed(source: Path, column: str) -> Path:
    """Return a file with another name of the column."""
    other = source.with_name("other.csv")
    other.write_text(source.read_text().replace("text", column))
    return other


def test_a_worker_refuses_another_bundle(runner: Runner, source: Path, store: Path) -> None:
    runner.run(source)
    [job] = runner.jobs
    digest = job.digest
    (store / "all" / "1" / "golden.json").write_text("changed")
    with pytest.raises(BulkError, match="all@1"):
        _open_pipeline(job)
    other = BulkJob(job.options, job.model, "0" * 64, job.settings, job.plan, job.output)
    (store / "all" / "1" / "golden.json").write_text("golden.json")
    with pytest.raises(BulkError, match="the bundle all@1 is not the one that the run began with"):
        _open_pipeline(other)
    assert digest != other.digest
    with pytest.raises(BulkError, match=r"^(?!.*is not the one).*all@1"):
        _open_pipeline(job)  # its graph is no graph
