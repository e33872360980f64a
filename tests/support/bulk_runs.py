"""Bulk runs in this process, and files of rows in each format."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner, Result

from cloze.cli import cli

TEXTS = [
    "the king",
    "the old king was in the house",
    "a moon over the sea",
    "paris",
    "walk and run",
]


Rows = list[dict[str, Any]]


def bulk(store: Path, *arguments: object) -> Result:
    """Run the command in this process."""
    words = ["bulk", *map(str, arguments), "--model-store", str(store)]
    result = CliRunner().invoke(cli, words, prog_name="cloze")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def write(path: Path, rows: Rows) -> Path:
    """Write rows in the format of the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return path


def read(folder: Path) -> Rows:
    """Return all rows of the results, in the order of the files."""
    rows: Rows = []
    for part in sorted(folder.glob("part-*")):
        if part.suffix == ".parquet":
            rows += pq.read_table(part).to_pylist()
        else:
            rows += [json.loads(line) for line in part.read_text().splitlines()]
    return rows


def numbered(count: int) -> Rows:
    return [
        {"id": i, "text": f"{TEXTS[i % len(TEXTS)]} {'water ' * (i % 13)}"} for i in range(count)
    ]
