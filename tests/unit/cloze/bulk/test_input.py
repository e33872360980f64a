"""The input of a bulk run: files, columns, rows and shards."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cloze.bulk import chunks, text_files
from cloze.bulk.chunks import Chunk, chunk_of_batch, chunk_of_rows, grouped, is_json, json_field
from cloze.bulk.errors import BulkError
from cloze.bulk.parquet_files import ParquetReader, open_parquet
from cloze.bulk.plan import FileFormat, Plan, Shard
from cloze.bulk.sources import ShardReader, check_column, check_text_column, input_files, make_plan
from cloze.bulk.text_files import ColumnTypes, Range


def silent(_: str) -> None:
    raise AssertionError("small files need no report")


def plan_of(*paths: Path, shard_rows: int = 2) -> Plan:
    file_format, files = input_files(paths)
    return make_plan(file_format, files, shard_rows, silent)


def texts_of(plan: Plan, *columns: str) -> list[list[Any]]:
    """Return the texts of the chunks of each shard."""
    reader = ShardReader(plan, columns, plan.schema)
    return [[chunk.inputs for chunk in reader.read(shard)] for shard in plan.shards]


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_folder_gives_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.ndjson", "sub/c.jsonl", "_hidden/d.jsonl", ".e.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path / name, "{}\n")
    (tmp_path / "f.jsonl").mkdir()
    file_format, files = input_files([tmp_path])
    assert file_format is FileFormat.JSONL
    assert [Path(f.path).name for f in files] == ["a.ndjson", "b.jsonl", "c.jsonl"]
    assert all(Path(f.path).is_absolute() and f.size == 3 for f in files)
    assert files[0].mtime_ns == (tmp_path / "a.ndjson").stat().st_mtime_ns


def test_inputs_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("a.csv", "b.jsonl", "c.txt"):
        written(tmp_path / name, "x\n")
    for names, message in (
        (["missing.csv"], "no file or folder"),
        (["a.csv", "a.csv"], "is named twice"),
        (["a.csv", "b.jsonl"], "several formats: csv, jsonl"),
    ):
        with pytest.raises(BulkError, match=message):
            input_files([tmp_path / name for name in names])
    for content, message in (
        ("", "has no line with the names of the columns"),
        ("a,b,a\n", "has two columns named 'a'"),
        ('a\n"open', "is not a CSV file: before byte 7"),
    ):
        with pytest.raises(BulkError, match=message):
            plan_of(written(tmp_path / "x.csv", content))


def test_json_lines_are_divided_at_their_bytes(tmp_path: Path) -> None:
    text = '{"a": 1}\n\n{"a": "é"}\n{"a": null, "b": true}'
    file = written(tmp_path / "x.jsonl", text)
    plan = plan_of(file)
    size = len(text.encode())
    assert plan.shards == (Shard(0, 0, 0, 2, 0, 22), Shard(1, 0, 2, 1, 22, size))
    assert plan.rows == 3
    assert Plan.from_json(plan.to_json()) == plan
    ranges = Range(2, 0, 22), Range(1, 22, size)
    rows = [list(text_files.read(file, FileFormat.JSONL, each, [])) for each in ranges]
    assert rows == [[({"a": 1}, None), ({"a": "é"}, None)], [({"a": None, "b": True}, None)]]


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = written(tmp_path / "x.csv", b"\xef\xbb\xbfa,b\n1,2\n")
    plan = plan_of(file)
    assert plan.schema.names == ["a", "b"]
    assert plan.shards == (Shard(0, 0, 0, 1, 7, 11),)
    other = written(tmp_path / "y.jsonl", b'\xef\xbb\xbf{"a": 1}\n')
    assert plan_of(other).shards[0].rows == 1
    assert plan_of(other).schema.names == ["a"]
    # Elsewhere the same bytes are a character of the first field.
    later = written(tmp_path / "z.csv", "a\n1\n2\n\ufeff3\n")
    assert texts_of(plan_of(later), "a") == [[[("1",), ("2",)]], [[("\ufeff3",)]]]


def test_records_of_a_csv_file_may_have_several_lines(tmp_path: Path) -> None:
    file = written(tmp_path / "x.csv", 'a,b\n1,"two\nlines"\n\n3,4\n5,6\n')
    plan = plan_of(file)
    assert [(s.first_row, s.rows) for s in plan.shards] == [(0, 2), (2, 1)]
    assert texts_of(plan, "b") == [[[("two\nlines",), ("4",)]], [[("6",)]]]


def test_tabs_divide_the_fields_of_a_tsv_file(tmp_path: Path) -> None:
    """A comma is text there, and quotes are as in CSV."""
    file = written(tmp_path / "x.tsv", 'a\tb\n1\tone, two\n2\t"a\ttab"\n3\tc\n')
    plan = plan_of(file)
    assert plan.schema.names == ["a", "b"]
    assert Plan.from_json(plan.to_json()).format is FileFormat.TSV
    assert texts_of(plan, "b") == [[[("one, two",), ("a\ttab",)]], [[("c",)]]]
    with pytest.raises(BulkError, match="is not a TSV file: before byte 7"):
        plan_of(written(tmp_path / "y.tsv", 'a\n"open'))


def test_rows_that_are_wrong_have_an_error(tmp_path: Path) -> None:
    lines = written(tmp_path / "x.jsonl", '{"a": 1}\n{"a": \n[1]\n')
    rows = list(text_files.read(lines, FileFormat.JSONL, Range(3, 0, 99), []))
    assert rows[::2] == [({"a": 1}, None), (None, "the line is not a JSON object")]
    assert rows[1][0] is None
    assert str(rows[1][1]).startswith("the line is not JSON: ")
    table = written(tmp_path / "x.csv", "a,b\n1\n1,2,3\n")
    rows = list(text_files.read(table, FileFormat.CSV, Range(2, 4, 99), ["a", "b"]))
    assert rows == [
        ({"a": "1"}, "the row has 1 fields, and the header has 2"),
        ({"a": "1", "b": "2"}, "the row has 3 fields, and the header has 2"),
    ]


def test_the_limit_of_a_line_is_said_in_mib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 2 * 2**20)
    line = '{"a": "' + "x" * (2 * 2**20 - 11) + '"}\n'
    assert plan_of(written(tmp_path / "x.jsonl", line)).rows == 1
    with pytest.raises(BulkError, match="a line of more than 2 MiB after byte 0"):
        plan_of(written(tmp_path / "x.jsonl", line.replace("x", "xx", 1)))


def test_columns_have_the_type_of_all_their_values() -> None:
    types = ColumnTypes()
    types.add({"text": "a", "flag": True, "whole": 1, "number": 1, "mixed": 1, "big": 2**63})
    types.add({"text": None, "number": 0.5, "mixed": "a", "least": -(2**63), "late": None})
    types.add({"less": -(2**63) - 1, "most": 2**63 - 1, "nested": [1], "both": 1})
    types.add({"both": True})
    schema = types.schema()
    plain = {f.name: f.type for f in schema if not is_json(f)}
    assert plain == {
        "text": pa.string(),
        "flag": pa.bool_(),
        "whole": pa.int64(),
        "number": pa.float64(),
        "least": pa.int64(),
        "late": pa.string(),
        "most": pa.int64(),
    }
    assert [f.name for f in schema if is_json(f)] == ["mixed", "big", "less", "nested", "both"]
    assert schema.names[0] == "text"


def test_rows_have_at_most_a_thousand_keys() -> None:
    types = ColumnTypes()
    types.add({str(n): 1 for n in range(1000)})
    with pytest.raises(BulkError, match="more than 1000 different keys"):
        types.add({"one more": 1})


def parquet(path: Path, rows: int, group: int = 3, **types: Any) -> Path:
    columns = {"text": pa.array([f"t{n}" for n in range(rows)]), "n": pa.array(range(rows))}
    columns |= {name: column.cast(types[name]) for name, column in columns.items() if name in types}
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def test_the_shards_of_parquet_are_ranges_of_rows(tmp_path: Path) -> None:
    plan = plan_of(parquet(tmp_path / "a.parquet", 5), parquet(tmp_path / "b.parquet", 2))
    assert plan.shards == (
        Shard(0, 0, 0, 2), Shard(1, 0, 2, 2), Shard(2, 0, 4, 1), Shard(3, 1, 0, 2),
    )  # fmt: skip
    assert plan.format is FileFormat.PARQUET
    reader = ShardReader(plan, ["text"], pa.schema([plan.schema.field("n")]))
    read = [[(c.inputs, c.kept.to_pydict()) for c in reader.read(shard)] for shard in plan.shards]
    assert read[0] == [([("t0",), ("t1",)], {"n": [0, 1]})]
    assert read[2] == [([("t4",)], {"n": [4]})]
    assert read[3] == [([("t0",), ("t1",)], {"n": [0, 1]})]


def test_ranges_of_rows_in_any_order(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", 10)
    for ranges in ([(0, 10)], [(5, 2), (1, 3), (9, 1)], [(0, 2), (6, 3), (2, 1)]):
        reader = ParquetReader()
        for first, rows in ranges:
            batches = reader.read(file, ["n"], first, rows)
            numbers = [n for batch in batches for n in batch["n"].to_pylist()]
            assert numbers == list(range(first, first + rows))


def test_parquet_files_that_do_not_fit(tmp_path: Path) -> None:
    first = parquet(tmp_path / "a.parquet", 1)
    other = parquet(tmp_path / "b.parquet", 1, n=pa.int32())
    with pytest.raises(BulkError, match=r"other columns than .*: n as int32 instead of int64"):
        plan_of(first, other)
    doubled = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(doubled, tmp_path / "c.parquet")
    with pytest.raises(BulkError, match="has two columns named 'x'"):
        plan_of(tmp_path / "c.parquet")
    with pytest.raises(BulkError, match=r"d.parquet is not a Parquet file"):
        open_parquet(written(tmp_path / "d.parquet", "text"))
    with pytest.raises(BulkError, match=r"cannot read the input: .*a.parquet"):
        file_format, files = input_files([first])
        first.unlink()
        make_plan(file_format, files, 2, silent)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    file = written(tmp_path / "x.csv", "a\n1\n2\n")
    plan = plan_of(file)
    reader = ShardReader(plan, ["a"], plan.schema)
    assert sum(len(chunk) for chunk in reader.read(plan.shards[0])) == 2

    def check_fails(shard: Shard, message: str = "has changed since the run began") -> None:
        with pytest.raises(BulkError, match=message):
            list(reader.read(shard))

    check_fails(Shard(0, 0, 0, 3, plan.shards[0].start, plan.shards[0].end))
    written(file, "a\n1\n2\n3\n")
    check_fails(plan.shards[0])
    written(file, "a\n3\n4\n")  # of the same size
    os.utime(file, ns=(0, plan.files[0].mtime_ns + 1))
    check_fails(plan.shards[0])
    file.unlink()
    check_fails(plan.shards[0], r"x.csv cannot be read: No such file")


def test_text_columns() -> None:
    texts = {
        "plain": pa.string(), "large": pa.large_string(), "view": pa.string_view(), "none": pa.null(),
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
    }  # fmt: skip
    others = {"number": pa.int64(), "keys": pa.dictionary(pa.int32(), pa.int64())}
    schema = pa.schema(list((texts | others).items()))
    for name in texts:
        check_text_column(schema, name)
    for name, kind in others.items():
        with pytest.raises(BulkError, match=f"the column '{name}' is {kind}".split("<")[0]):
            check_text_column(schema, name)
    with pytest.raises(BulkError, match=r"no column 'x' \(columns: plain, large"):
        check_column(schema, "x")
    with pytest.raises(BulkError, match=r"\(columns: none\)"):
        check_column(pa.schema([]), "x")


def test_rows_of_text_files_become_columns() -> None:
    schema = pa.schema([pa.field("n", pa.float64()), json_field("any"), pa.field("s", pa.string())])
    row = {"n": 1, "any": [1], "s": "a", "t": "x"}
    chunk = chunk_of_rows([(row, None), (None, "wrong"), ({"any": "b"}, "odd")], ["t", "s"], schema)
    kept = {"n": [1.0, None, None], "any": ["[1]", None, '"b"'], "s": ["a", None, None]}
    assert chunk.kept.to_pydict() == kept
    assert chunk.inputs == [("x", "a"), (None, None), (None, None)]
    assert chunk.errors == [None, "wrong", "odd"]
    assert (len(chunk), chunk.characters) == (3, 2)


def test_the_mark_of_json_is_that_of_earlier_runs() -> None:
    """The plan of a run that continues has it."""
    assert json_field("x").metadata == {b"cloze": b"json"}
    marks = {b"a": b"b", b"cloze": b"json"}, {b"cloze": b"other"}, None
    fields = [pa.field("x", pa.string(), metadata=each) for each in marks]
    assert [is_json(field) for field in fields] == [True, False, False]


def test_bytes_that_are_no_text_are_replaced_in_what_is_kept() -> None:
    broken = b"a\xff".decode(errors="surrogateescape")
    chunk = chunk_of_rows(
        [({"t": broken}, None), ({"t": None}, None)], ["t"], pa.schema([("t", pa.string())])
    )
    assert chunk.kept.to_pydict() == {"t": ["a\N{REPLACEMENT CHARACTER}", None]}
    assert chunk.inputs == [(broken,), (None,)]


def test_batches_of_parquet() -> None:
    raw = pa.array([b"a", b"\xff", None], pa.binary()).view(pa.string())
    words = pa.array(["x", "y", "x"]).dictionary_encode()
    batch = pa.RecordBatch.from_arrays([raw, words, pa.array([1, 2, 3])], names=["t", "w", "n"])
    chunk = chunk_of_batch(batch, ["t", "w"], pa.schema([("n", pa.int64())]))
    assert chunk.inputs == [("a", "x"), (b"\xff", "y"), (None, "x")]
    assert chunk.kept.to_pydict() == {"n": [1, 2, 3]}
    assert chunk.errors == [None] * 3
    assert isinstance(chunk, Chunk)


def test_rows_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 2)
    rows: list[Any] = [({"n": n}, None) for n in range(5)]
    assert list(grouped(iter(rows))) == [rows[:2], rows[2:4], rows[4:]]
    assert list(grouped(iter(rows[:4]))) == [rows[:2], rows[2:4]]
    assert list(grouped(iter(()))) == []
