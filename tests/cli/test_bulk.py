"""`cloze bulk` without Ray: formats, shards, errors per row, resuming, and the server's answers."""

import csv
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertForSequenceClassification

from cloze.bulk import text_files
from cloze.bulk.parquet_files import ParquetReader
from cloze.bulk.plan import FileFormat
from cloze.bulk.text_files import ColumnTypes
from cloze.export.publish import export
from cloze.model_store import Store
from tests.support import tiny
from tests.support.bulk_runs import bulk, numbered, read, write
from tests.support.faulty import assert_close
from tests.support.serving import Server, bare_environment, running_server
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    """Return a store with a model for every bulk task."""
    root, folder = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("classifier")
    tiny.CLASSES["bert-classifier"] = BertForSequenceClassification
    tiny.save_checkpoint(folder, "bert-classifier", id2label={0: "bad", 1: "good"})
    for kind, source in (
        ("bert", checkpoints["bert"]),
        ("bert-qa", checkpoints["bert-qa"]),
        ("classifier", folder),
    ):
        export(str(source), kind, Store(root))
    return root


@pytest.mark.parametrize(
    ("suffix", "output_format"), [("parquet", "parquet"), ("jsonl", "parquet"), ("csv", "jsonl")]
)
def test_every_row_comes_back_once_and_in_order(
    store: Path, tmp_path: Path, suffix: str, output_format: str
) -> None:
    rows = numbered(50)
    write(tmp_path / "in" / f"a.{suffix}", rows[:30])
    write(tmp_path / "in" / "sub" / f"b.{suffix}", rows[30:])
    write(tmp_path / "in" / f"_hidden.{suffix}", rows)
    output = tmp_path / "out"
    done = bulk(
        store, "embed", tmp_path / "in", "--output", output, "--shard-rows", 8, "--json",
        "--output-format", output_format,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert (summary["rows"], summary["errors"], summary["files"]) == (50, 0, 4 + 3)
    assert summary["model"] == "bert@1"
    assert summary["texts_per_s"] > 0
    assert summary["tokens_per_s"] > summary["texts_per_s"]
    results = read(output)
    kind = str if suffix == "csv" else int
    assert [(row["id"], row["text"]) for row in results] == [
        (kind(row["id"]), row["text"]) for row in rows
    ]
    vectors = np.array([row["embedding"] for row in results], np.float32)
    assert vectors.shape == (50, 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert all(row["tokens"] > 2 and not row["truncated"] for row in results)
    if output_format == "parquet":  # as one table, without the names that begin with "_"
        assert pq.read_table(output).num_rows == 50


CELL = st.text(
    st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=8
) | st.sampled_from(['"', "a\nb", ",", '","', "\n\n", "  "])


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(CELL, CELL), max_size=12), shard_rows=st.integers(1, 5))
def test_the_shards_of_a_csv_file_are_its_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], shard_rows: int
) -> None:
    path = tmp_path_factory.mktemp("csv") / "in.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("a", "b"), *rows])
    shards, header = text_files.scan(path, FileFormat.CSV, shard_rows, ColumnTypes())
    assert header == ["a", "b"]
    assert all(shard.rows == shard_rows for shard in shards[:-1])
    parts = [list(text_files.read(path, FileFormat.CSV, shard, header)) for shard in shards]
    assert [len(part) for part in parts] == [shard.rows for shard in shards]
    assert [row for part in parts for row in part] == [({"a": a, "b": b}, None) for a, b in rows]


def test_a_large_row_group_is_not_read_at_once(tmp_path: Path) -> None:
    path, rows = tmp_path / "in.parquet", 200_000
    texts = pa.array([f"{i:0200d}" for i in range(rows)])
    pq.write_table(pa.table({"text": texts}), path, row_group_size=rows, use_dictionary=False)
    size = texts.nbytes
    del texts
    pool = pa.default_memory_pool()
    pool.release_unused()
    before, most, read = pool.bytes_allocated(), 0, 0
    for batch in ParquetReader().read(path, ["text"], 0, rows):
        read += len(batch)
        most = max(most, pool.bytes_allocated() - before)
    assert read == rows
    assert most < size / 4


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with running_server(store) as server:
        yield server


def asked(server: Server, route: str, inputs: object, **parameters: object) -> Any:
    answer = httpx.post(f"{server.url}{route}", json={"inputs": inputs, "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_answers_are_the_server_s(store: Path, server: Server, tmp_path: Path) -> None:
    texts = [row["text"] for row in numbered(100)]
    source = write(tmp_path / "in.parquet", [{"text": text} for text in texts])
    assert bulk(store, "embed", source, "--output", tmp_path / "e").exit_code == 0
    vectors = [row["embedding"] for row in read(tmp_path / "e")]
    expected = httpx.post(f"{server.url}/embed", json={"inputs": texts}).json()
    np.testing.assert_allclose(vectors, expected, atol=1e-5)

    assert bulk(store, "classify", source, "--output", tmp_path / "c").exit_code == 0
    labels = [row["labels"] for row in read(tmp_path / "c")]
    assert_close(labels, asked(server, "/classify", texts))

    masked = ["the [MASK] was old", "a [MASK] and a [MASK]"]
    source = write(tmp_path / "masked.jsonl", [{"text": text} for text in masked])
    arguments = ("--top-k", 2, "--target", "king", "--target", "moon", "--target", "sun")
    done = bulk(store, "fill-mask", source, "--output", tmp_path / "f", *arguments)
    assert done.exit_code == 0
    one, two = asked(server, "/fill-mask", masked, top_k=2, targets=["king", "moon", "sun"])
    assert_close([row["predictions"] for row in read(tmp_path / "f")], [[one], two])

    pairs = [
        {"question": "who can see", "context": "the king can see the moon over paris"},
        {"question": "what is red", "context": "the old tree " * 200 + "the house is red"},
    ]
    source = write(tmp_path / "pairs.csv", pairs)
    assert bulk(store, "qa", source, "--output", tmp_path / "q", "--top-k", 3).exit_code == 0
    assert_close(
        [row["answers"] for row in read(tmp_path / "q")], asked(server, "/qa", pairs, top_k=3)
    )


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.glob("part-*")}


@pytest.mark.parametrize(
    ("suffix", "end"),
    [("parquet", signal.SIGINT), ("jsonl", signal.SIGINT), ("parquet", signal.SIGKILL)],
)
def test_a_run_that_ends_early_goes_on_and_writes_each_row_once(
    store: Path, tmp_path: Path, suffix: str, end: int
) -> None:
    """Time is short here: a long shard has a file and a line per chunk of rows."""
    count = 6_000
    source, output = write(tmp_path / f"in.{suffix}", numbered(count)), tmp_path / "out"
    source.with_name("main.py").write_text(
        "import cloze.bulk.work, cloze.bulk_command\n"
        "cloze.bulk.work._FILE_S = cloze.bulk_command._LINE_EVERY_S = 0\n"
        "from cloze.cli import main\n"
        "main()\n"
    )
    arguments = ("embed", source, "--output", output)
    command = [sys.executable, str(tmp_path / "main.py"), "bulk", *map(str, arguments)]
    process = subprocess.Popen(
        [*command, "--model-store", str(store)],
        env=bare_environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: len([*output.glob("part-*")]) >= 3, longest_s=60)
    process.send_signal(end)
    stderr = process.communicate(timeout=60)[1]
    if end == signal.SIGINT:
        assert process.returncode == 130
        first, *_, last = stderr.splitlines()
        assert re.fullmatch(r"256 of 6,000 rows, [\d,.]+ rows/s, about [\d,]+ min left", first)
        kept = "complete files are kept, the same command goes on from there"
        assert last == f"cloze: interrupted; {kept}"
        assert not [*output.glob("_part-*")]
    else:
        assert process.returncode == -signal.SIGKILL
        (output / f"_part-00000-000000512.{suffix}").touch()  # of a run that is killed in a file
    before = stamps(output)
    assert f"part-00000-000000256.{suffix}" in before
    assert f"part-00000.{suffix}" not in before

    done = bulk(store, *arguments, "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert (summary["rows"], summary["errors"]) == (count, 0)
    assert (summary["resumed_files"], summary["files"]) == (len(before), len(before) + 1)
    after = stamps(output)
    assert after.items() > before.items(), "complete files are not written again"
    assert not [*output.glob("_part-*")]
    assert [row["id"] for row in read(output)] == list(range(count))
    again = bulk(store, *arguments, "--json")
    assert json.loads(again.stdout)["resumed_files"] == len(after)
    assert stamps(output) == after
