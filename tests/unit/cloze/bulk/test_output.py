"""The output of a bulk run: its folder, its files, its summary, and who may continue it."""

import json
import multiprocessing
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cloze.bulk import work
from cloze.bulk.chunks import Chunk, chunk_of_rows, json_field
from cloze.bulk.errors import BulkError
from cloze.bulk.job import BulkJob, JobOptions
from cloze.bulk.plan import FileFormat, InputFile, Plan, Shard
from cloze.bulk.run_folder import RunFolder, ShardReport
from cloze.bulk.summary import summarize
from cloze.bulk.tasks import BULK_TASKS
from cloze.bulk.work import _count, _problem, _requests, _with_columns
from cloze.bulk.writers import RowResult, open_writer
from cloze.bulk_command import bulk
from cloze.service.errors import EngineFailed, InvalidRequest, Location
from cloze.service.settings import Settings
from cloze.service.tasks.answer_spans import QaAnswer
from cloze.service.tasks.fill_tokens import Prediction
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.text_classification import LabelScore

SHARDS = (Shard(0, 0, 0, 2), Shard(1, 1, 0, 3))
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
PLAN = Plan(
    FileFormat.CSV, (InputFile("/in/a.csv", 10, 1_500_000_000), InputFile("/in/b.csv", 20, 2)), SCHEMA, SHARDS
)  # fmt: skip


def options(**changes: Any) -> JobOptions:
    fields: dict[str, Any] = {
        "command": "embed", "columns": ("text",), "parameters": {}, "id_column": None, "prefix": "",
        "format": FileFormat.PARQUET, "shard_rows": 100,
    }  # fmt: skip
    return JobOptions(**(fields | changes))


def job(plan: Plan = PLAN, **changes: Any) -> BulkJob:
    return BulkJob(options(**changes), "tiny@1", "d" * 64, Settings(), plan, Path("/out"))


def report(shard: int, **changes: Any) -> ShardReport:
    fields = {"rows": 2, "errors": 0, "truncated": 0, "tokens": 10, "precision": "fp32"}
    return ShardReport(shard, **(fields | changes))


def test_results_get_their_name_when_they_are_complete(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, FileFormat.JSONL)
    with folder.locked():
        unfinished = folder.unfinished(SHARDS[1])
        assert unfinished.name.startswith("_part-00001-")
        assert unfinished != folder.unfinished(SHARDS[1])
        unfinished.write_text("x")
        assert not folder.is_complete(SHARDS[1])
        folder.complete(unfinished, SHARDS[1], report(1, first_error="row 3: no"))
    assert folder.is_complete(SHARDS[1])
    assert (tmp_path / "part-00001.jsonl").read_text() == "x"
    assert not unfinished.exists()
    assert folder.report(SHARDS[1]) == report(1, first_error="row 3: no")
    assert [p.name for p in (tmp_path / "_reports").glob("*.json")] == ["00001.json"]


def test_a_damaged_report_names_the_file_to_remove(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, FileFormat.JSONL)
    (tmp_path / "_reports").mkdir()
    for content in (None, "no json", '{"shard": 0}'):
        if content is not None:
            (tmp_path / "_reports/00000.json").write_text(content)
        with pytest.raises(
            BulkError, match=r"00000.json is missing or damaged; remove .*part-00000.jsonl"
        ):
            folder.report(SHARDS[0])


def begun(folder: RunFolder, **changes: Any) -> None:
    one = job(**changes)
    with folder.locked():
        folder.begin(one.identity(), one.plan)


def test_a_folder_keeps_the_plan_of_its_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new/out", FileFormat.PARQUET)
    assert folder.recorded_plan(PLAN.files, 100) is None
    folder.check_content()
    begun(folder)
    assert folder.recorded_plan(PLAN.files, 100) == PLAN
    assert folder.recorded_plan(PLAN.files, 99) is None
    assert folder.recorded_plan(PLAN.files[1:], 100) is None
    folder.check_content()


def test_a_folder_with_results_is_only_for_the_same_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, FileFormat.PARQUET)
    begun(folder, prefix="other_")
    left = folder.unfinished(SHARDS[0])
    left.write_text("x")
    begun(folder)  # without results it may be another
    assert not left.exists()
    folder.result(SHARDS[0]).write_text("x")
    begun(folder)
    for changes, name in (
        ({"prefix": "new_"}, 'prefix was "", and is now "new_";'),
        ({"command": "fill-mask"}, "task was"),
        ({"parameters": {"top_k": 1}}, "parameters was"),
        ({"format": FileFormat.JSONL}, "output format was"),
        ({"shard_rows": 7}, "rows per shard was"),
    ):
        with pytest.raises(BulkError, match=f"its {name}"):
            begun(folder, **changes)
    identity = job().identity()
    assert identity["model"] == ["tiny@1", "d" * 64]
    assert identity["inputs"] == [["/in/a.csv", 10, 1_500_000_000], ["/in/b.csv", 20, 2]]
    settings = Settings()
    assert identity["device and precision"] == [str(settings.device), str(settings.precision)]


def test_folders_with_other_content_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BulkError, match="file is a file; --output is a folder"):
        RunFolder(tmp_path / "file", FileFormat.PARQUET).check_content()
    with pytest.raises(BulkError, match=r"has other content, and no _manifest.json"):
        RunFolder(tmp_path, FileFormat.PARQUET).check_content()
    (tmp_path / "new/_reports").mkdir(parents=True)
    RunFolder(tmp_path / "new", FileFormat.PARQUET).check_content()
    RunFolder(tmp_path / "missing", FileFormat.PARQUET).check_content()
    for damaged in ("[]", "no json", '{"identity": {}}', '{"plan": {"shards": []}}'):
        (tmp_path / "_manifest.json").write_text(damaged)
        with pytest.raises(BulkError, match="is damaged"):
            RunFolder(tmp_path, FileFormat.PARQUET).recorded_plan(PLAN.files, 100)
    with (
        pytest.raises(BulkError, match=r"cannot write to .*file/out: "),
        RunFolder(tmp_path / "file/out", FileFormat.CSV).locked(),
    ):
        pass


def _try_to_lock(path: Path, queue: Any) -> None:
    try:
        with RunFolder(path, FileFormat.PARQUET).locked():
            queue.put("locked")
    except BulkError as error:
        queue.put(str(error))


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    lock = RunFolder(tmp_path, FileFormat.PARQUET).locked()
    for held, answer in ((lock, f"another run writes to {tmp_path}"), (nullcontext(), "locked")):
        with held:
            process = context.Process(target=_try_to_lock, args=(tmp_path, queue))
            process.start()
            assert queue.get(timeout=20) == answer
            process.join()


def test_the_columns_of_the_output() -> None:
    assert job().schema.names == ["id", "text", "embedding", "tokens", "truncated", "error"]
    few = job(id_column="id", prefix="x_")
    assert few.schema.names == ["id", "x_embedding", "x_tokens", "x_truncated", "x_error"]
    assert [str(f.type) for f in few.schema][2:] == ["int32", "bool", "string"]


def test_columns_that_collide_or_miss() -> None:
    job().check_columns()
    job(id_column="id").check_columns()
    with pytest.raises(BulkError, match="the column 'id' is int64, not text"):
        job(columns=("id",)).check_columns()
    with pytest.raises(BulkError, match="no column 'x'"):
        job(id_column="x").check_columns()
    taken = Plan(PLAN.format, PLAN.files, SCHEMA.append(pa.field("tokens", pa.int32())), SHARDS)
    with pytest.raises(BulkError, match="a column 'tokens', as the results have; give --prefix"):
        job(taken).check_columns()
    job(taken, prefix="x_").check_columns()
    job(taken, id_column="id").check_columns()


def test_a_summary_counts_both_runs_and_measures_this_one() -> None:
    earlier = [report(0, errors=1, truncated=1, precision="int8", first_error="row 2: no")]
    now = [report(1, rows=3, errors=1, tokens=50, first_error="row 1: bad")]
    summary = summarize(job(), earlier, now, 0.5)
    assert asdict(summary) == {
        "output": "/out", "model": "tiny@1", "precisions": ["fp32", "int8"], "rows": 5, "errors": 2,
        "truncated": 1, "files": 2, "resumed_files": 1, "seconds": 0.5, "texts_per_s": 4.0,
        "tokens_per_s": 100.0, "first_error": "/in/a.csv, row 2: no", "embedding_spaces": [],
    }  # fmt: skip
    assert summarize(job(), earlier, now, 10.0).texts_per_s == pytest.approx(0.2)
    assert summarize(job(), [], [report(1)], 0.0).first_error == ""
    assert summarize(job(), [], now, 1.0).first_error == "/in/b.csv, row 1: bad"


RESULTS = pa.schema(
    [("value", pa.list_(pa.float32())), ("tokens", pa.int32()), ("truncated", pa.bool_()), ("error", pa.string())]
)  # fmt: skip
GOOD = RowResult(np.array([0.5, 1], np.float32), 3, False, None)
BAD = RowResult(None, None, None, "no")


def chunk_of(*values: Any, kept: pa.Schema) -> Chunk:
    return chunk_of_rows([({"any": value}, None) for value in values], ["any"], kept)


@pytest.mark.parametrize("file_format", [FileFormat.PARQUET, FileFormat.JSONL])
def test_rows_are_written_with_their_results(tmp_path: Path, file_format: FileFormat) -> None:
    kept = pa.schema([json_field("any")])
    file = tmp_path / "x"
    writer = open_writer(file, file_format, pa.schema([*kept, *RESULTS]))
    writer.write(chunk_of([1], "a", kept=kept), [GOOD, BAD])
    writer.write(chunk_of(None, kept=kept), [GOOD])
    writer.close({})
    if file_format is FileFormat.PARQUET:
        rows = pq.read_table(file).to_pylist()
        assert [row["any"] for row in rows] == ["[1]", "a", None]
        assert pq.read_metadata(file).row_group(0).column(0).compression == "ZSTD"
        assert pq.read_metadata(file).num_row_groups == 1
    else:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [row["any"] for row in rows] == [[1], "a", None]
    assert [row["value"] for row in rows] == [[0.5, 1], None, [0.5, 1]]
    assert [row["error"] for row in rows] == [None, "no", None]
    assert [row["tokens"] for row in rows] == [3, None, 3]
    assert [row["truncated"] for row in rows] == [False, None, False]


def test_json_lines_of_values_that_json_lacks(tmp_path: Path) -> None:
    schema = pa.schema([("raw", pa.binary()), ("text", pa.string()), ("day", pa.date32())])
    raw = pa.array([b"\xff", None], pa.binary())
    batch = pa.RecordBatch.from_arrays(
        [raw, raw.view(pa.string()), pa.array([0, None], pa.date32())], schema=schema
    )
    writer = open_writer(tmp_path / "x", FileFormat.JSONL, pa.schema([*schema, *RESULTS]))
    strided = RowResult(np.arange(4, dtype=np.float32)[::2], 1, False, None)
    writer.write(Chunk(batch, [("a",), ("b",)], [None, None]), [strided, BAD])
    writer.close({})
    first, second = (json.loads(line) for line in (tmp_path / "x").read_text().splitlines())
    assert (second["raw"], second["text"], second["day"]) == (None, None, None)
    assert first == {
        "raw": "/w==", "text": "\N{REPLACEMENT CHARACTER}", "day": "1970-01-01", "value": [0, 2],
        "tokens": 1, "truncated": False, "error": None,
    }  # fmt: skip


def test_rows_that_no_model_answers() -> None:
    for text, problem in (
        ("a", None),
        ("", "t is empty"),
        (None, "t is missing"),
        (b"\xff", "t is not UTF-8"),
        ("\udcff", "t is not UTF-8"),
        (5, "t is not a string"),
    ):
        assert _problem([text], ["t"]) == _problem(["a", text], ["s", "t"]) == problem


def test_rows_are_divided_into_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_REQUEST_ROWS", 3)
    monkeypatch.setattr(work, "_REQUEST_CHARACTERS", 10)
    texts = [4, 6, 1, 1, 1, 1, 20, 10, 10, 1]
    chunk = chunk_of(*("a" * size for size in texts), kept=pa.schema([]))
    assert _requests(range(10), chunk) == [[0, 1], [2, 3, 4], [5], [6], [7], [8], [9]]
    assert _requests([0, 2, 9], chunk) == [[0, 2, 9]]
    assert _requests([], chunk) == []


def test_errors_name_the_columns() -> None:
    for columns, error, shown in (
        ("t", InvalidRequest("has 5 tokens", INPUTS.below(3)), "t has 5 tokens"),
        ("t", InvalidRequest("is empty", INPUTS), "t is empty"),
        ("qc", InvalidRequest("is 5", INPUTS.below(3, "question")), "q is 5"),
        ("qc", InvalidRequest("has 9 tokens", INPUTS.below(0)), "the row has 9 tokens"),
        ("t", InvalidRequest("has", Location(("top_k",))), "top_k has"),
        ("t", EngineFailed("inputs[0]"), "inputs[0]"),
    ):
        assert _with_columns(error, [*columns]) == shown


def test_totals_of_a_shard() -> None:
    counted = ShardReport(4, 0, 0, 0, 0, "fp32")
    _count(counted, 100, [GOOD, BAD])
    _count(counted, 100, [RowResult(1, 2, True, None), RowResult(None, None, None, "later")])
    assert counted == ShardReport(4, 4, 2, 1, 0, "fp32", "row 102: no")


def test_values_of_the_result_columns() -> None:
    one = Prediction(0.5, 7, "red", "red door")
    written = {"score": 0.5, "token": 7, "token_str": "red", "sequence": "red door"}
    fill = BULK_TASKS["fill-mask"]
    assert fill.to_values([[one], [[one], [one]]]) == [[[written]], [[written], [written]]]
    assert fill.to_values([[]]) == [[]]
    labels = BULK_TASKS["classify"].to_values([[LabelScore("a", 0.5)]])
    assert labels == [[{"label": "a", "score": 0.5}]]
    answer = QaAnswer("a", 0.5, 1, 2)
    shown = {"answer": "a", "score": 0.5, "start": 1, "end": 2}
    assert BULK_TASKS["qa"].to_values([answer, [answer, answer]]) == [[shown], [shown, shown]]
    assert BULK_TASKS["embed"].to_values(np.eye(2))[1].tolist() == [0, 1]
    for task, value in (("fill-mask", [[written]]), ("classify", labels[0]), ("qa", [shown])):
        assert pa.array([value], BULK_TASKS[task].type).to_pylist() == [value]


def test_every_option_of_a_task_is_one_of_its_parameters() -> None:
    """The command passes what the task's parameters name, so another option would have no effect."""
    assert bulk.commands.keys() == BULK_TASKS.keys()
    options = {
        name: {option.name for option in command.params} for name, command in bulk.commands.items()
    }
    shared = set.intersection(*options.values()) - {"long_text"}
    for name, task in BULK_TASKS.items():
        columns = {f"{part}_column" for part in task.inputs}
        assert options[name] - shared - columns <= task.task.parameters.model_fields.keys()
        assert columns <= options[name]
