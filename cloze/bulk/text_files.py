"""Rows of JSONL, CSV and TSV files, with the bytes where they begin.

One pass over a file finds the bytes of each shard and the types of the columns. The parser of the
pass is the parser that reads a shard, so both see the same rows.

A copy of the rows as Parquet would need no bytes, but took 2.9 s of processor time and 76 MB of
disk for 200 MB of JSONL, where the pass takes 0.9 s. Reading the shards takes 1.2 s, and took 0.9 s
from the copy. The types of the columns are known only at the end, so a copy needs this pass, too.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
import pyarrow as pa

from cloze.bulk.chunks import ReadRow, json_field
from cloze.bulk.errors import BulkError
from cloze.bulk.plan import FileFormat
from cloze.model_store import csv_rows

MAX_LINE_BYTES = 64 * 2**20
"""Longest line of a file; a longer one is more likely not a text file."""

_MAX_COLUMNS = 1000

_MAX_INT64 = 2**63

_BOM = b"\xef\xbb\xbf"


class Range(NamedTuple):
    """Some rows of a text file: their number, their first byte, and the byte after them."""

    rows: int
    start: int
    end: int


class _Lines:
    """The lines of a file from one byte to another.

    Attributes:
        position: the byte after the last line that was read.
    """

    def __init__(self, stream: BinaryIO, path: Path, start: int, end: int | None) -> None:
        self._stream, self._path, self._end = stream, path, end
        self.position = start
        stream.seek(start)
        if start == 0 and stream.read(len(_BOM)) == _BOM:
            self.position = len(_BOM)
        stream.seek(self.position)

    def __iter__(self) -> Iterator[bytes]:
        while self._end is None or self.position < self._end:
            line = self._stream.readline(MAX_LINE_BYTES)
            if not line:
                return
            if len(line) == MAX_LINE_BYTES:
                raise BulkError(
                    f"{self._path} has a line of more than {MAX_LINE_BYTES >> 20} MiB after byte "
                    f"{self.position}"
                )
            self.position += len(line)
            yield line

    def texts(self) -> Iterator[str]:
        """Yield the lines as texts; bytes that are not UTF-8 become surrogates."""
        for line in self:
            yield line.decode(errors="surrogateescape")


class ColumnTypes:
    """Collects the columns of JSON objects with the types of their values."""

    def __init__(self) -> None:
        self._kinds: dict[str, set[type | None]] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Note the values of a row."""
        for name, value in row.items():
            kind = (
                None
                if type(value) is int and not -_MAX_INT64 <= value < _MAX_INT64
                else type(value)
            )
            self._kinds.setdefault(name, set()).add(kind)
        if len(self._kinds) > _MAX_COLUMNS:
            raise BulkError(f"the rows have more than {_MAX_COLUMNS} different keys; the limit")

    def schema(self) -> pa.Schema:
        """Return the columns, in the order of their first use."""
        return pa.schema([_field(name, kinds) for name, kinds in self._kinds.items()])


def _field(name: str, kinds: set[type | None]) -> pa.Field:
    for types, arrow in (
        ({str}, pa.string()),
        ({bool}, pa.bool_()),
        ({int}, pa.int64()),
        ({int, float}, pa.float64()),
    ):
        if kinds <= types | {type(None)}:
            return pa.field(name, arrow)
    return json_field(name)


def scan(
    path: Path, file_format: FileFormat, shard_rows: int, types: ColumnTypes
) -> tuple[list[Range], list[str] | None]:
    """Return the bytes of each shard of a file.

    Args:
        types: receives the columns of a JSONL file.

    Returns:
        The shards, and the columns of a CSV or TSV file in order.

    Raises:
        BulkError: the file cannot be divided into rows.
        OSError: the file cannot be read.
    """
    shards: list[Range] = []
    with path.open("rb") as stream:
        lines = _Lines(stream, path, 0, None)
        header = None
        if (delimiter := file_format.delimiter) is not None:
            header = _header(path, lines, delimiter)
            rows = _table_rows(path, lines, delimiter, header)
        else:
            rows = _jsonl_rows(lines)
        start, count = lines.position, 0
        for row, _ in rows:
            if row is not None and header is None:
                types.add(row)
            count += 1
            if count == shard_rows:
                shards.append(Range(count, start, lines.position))
                start, count = lines.position, 0
        if count:
            shards.append(Range(count, start, lines.position))
    return shards, header


def read(path: Path, file_format: FileFormat, place: Range, header: list[str]) -> Iterator[ReadRow]:
    """Yield the rows of a shard.

    Args:
        place: the bytes of the shard.
    """
    with path.open("rb") as stream:
        lines = _Lines(stream, path, place.start, place.end)
        if (delimiter := file_format.delimiter) is not None:
            yield from _table_rows(path, lines, delimiter, header)
        else:
            yield from _jsonl_rows(lines)


def _jsonl_rows(lines: _Lines) -> Iterator[ReadRow]:
    for line in lines:
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            yield None, f"the line is not JSON: {error.msg}"
            continue
        if isinstance(row, dict):
            yield row, None
        else:
            yield None, "the line is not a JSON object"


def _header(path: Path, lines: _Lines, delimiter: str) -> list[str]:
    try:
        header = csv_rows.header_of(_records(path, lines, delimiter))
    except ValueError as error:
        raise BulkError(f"{path} {error}") from None
    return header


def _table_rows(path: Path, lines: _Lines, delimiter: str, header: list[str]) -> Iterator[ReadRow]:
    for _, record in _records(path, lines, delimiter):
        yield csv_rows.named(header, record)


def _records(path: Path, lines: _Lines, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the records that are not empty; a record may have several lines."""
    try:
        yield from csv_rows.records(
            lines.texts(), most_characters=MAX_LINE_BYTES, delimiter=delimiter
        )
    except csv.Error as error:
        kind = path.suffix[1:].upper()
        raise BulkError(
            f"{path} is not a {kind} file: before byte {lines.position}, {error}"
        ) from None
