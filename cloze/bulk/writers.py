"""Writes the rows of a shard with their results, as Parquet or JSON lines."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from cloze.bulk.chunks import Chunk, is_json
from cloze.bulk.plan import FileFormat

_ROW_GROUP_BYTES = 32 * 2**20
"""Size of the results that are collected in memory before they are written."""


class RowResult(NamedTuple):
    """The result of a row.

    Attributes:
        value: the value of the result column; None with an error.
        tokens: tokens of the row's texts that the model read; None with an error.
        truncated: whether the model did not read all tokens; None with an error.
        error: why there is no value; None if there is one.
    """

    value: Any
    tokens: int | None
    truncated: bool | None
    error: str | None


class ShardWriter(Protocol):
    """Writes one file."""

    def write(self, chunk: Chunk, results: Sequence[RowResult]) -> None:
        """Append rows."""
        ...

    def close(self, metadata: Mapping[str, str]) -> None:
        """End the file, with what is true of all of its rows."""
        ...


def open_writer(path: Path, file_format: FileFormat, schema: pa.Schema) -> ShardWriter:
    """Return a writer.

    Args:
        schema: the columns of the file; the last four are of a `RowResult`.
    """
    if file_format is FileFormat.PARQUET:
        return _ParquetWriter(path, schema)
    return _JsonlWriter(path, schema)


class _ParquetWriter:
    """Writes Parquet. A column of several JSON types has texts, and JSON of the other values."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = pa.schema([field.remove_metadata() for field in schema])
        self._file = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0

    def write(self, chunk: Chunk, results: Sequence[RowResult]) -> None:
        columns = zip(*results, strict=True)
        fields = list(self._schema)[-len(RowResult._fields) :]
        arrays = [
            pa.array(list(values), field.type)
            for values, field in zip(columns, fields, strict=True)
        ]
        kept = [
            _texts(column) if is_json(field) else column
            for column, field in zip(chunk.kept.columns, chunk.kept.schema, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays([*kept, *arrays], schema=self._schema)
        self._batches.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._batches:
            self._file.write_table(pa.Table.from_batches(self._batches, self._schema))
        self._batches, self._bytes = [], 0

    def close(self, metadata: Mapping[str, str]) -> None:
        self._flush()
        self._file.add_key_value_metadata(metadata)
        self._file.close()


def _texts(column: pa.Array) -> pa.Array:
    """Return the texts of JSON strings, and other JSON as it is."""
    values = column.to_pylist()
    return pa.array([orjson.loads(v) if v and v[0] == '"' else v for v in values], pa.string())


class _JsonlWriter:
    """Writes JSON lines."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._names = schema.names
        self._file = path.open("wb")

    def write(self, chunk: Chunk, results: Sequence[RowResult]) -> None:
        columns = [
            _values(column, field)
            for column, field in zip(chunk.kept.columns, chunk.kept.schema, strict=True)
        ]
        # A chunk without columns has rows, too.
        kept = zip(*columns, strict=True) if columns else [()] * len(chunk)
        for row, result in zip(kept, results, strict=True):
            values = dict(zip(self._names, [*row, *result], strict=True))
            options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
            self._file.write(orjson.dumps(values, _json_value, options))

    def close(self, _: Mapping[str, str]) -> None:
        self._file.close()


def _values(column: pa.Array, field: pa.Field) -> list[Any]:
    """Return the values of a column as orjson writes them."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        raw = column.cast(pa.large_binary()).to_pylist()
        values = [None if value is None else value.decode(errors="replace") for value in raw]
    if is_json(field):
        return [None if value is None else orjson.Fragment(value) for value in values]
    return values


def _json_value(value: Any) -> Any:
    """Return a value that orjson cannot write as one that it can."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, np.ndarray):  # not contiguous
        return value.tolist()
    return str(value)
