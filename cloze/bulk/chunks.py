"""Chunks: a few rows of a shard, as they are read, answered and written."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson
import pyarrow as pa

CHUNK_ROWS = 256
"""Most rows of a chunk."""

_JSON_MARK = {b"cloze": b"json"}
"""Metadata of a column whose texts are JSON values."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A few neighbouring rows.

    Attributes:
        kept: the columns that the output keeps; if there are none, a batch without rows.
        inputs: the values of the text columns, per row.
        errors: why a row cannot be read, per row; None: it can.
    """

    kept: pa.RecordBatch
    inputs: list[tuple[object, ...]]
    errors: list[str | None]

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def characters(self) -> int:
        """Number of characters of all texts."""
        return sum(len(text) for row in self.inputs for text in row if isinstance(text, str))


def json_field(name: str) -> pa.Field:
    """Return a column of JSON values, written as text: nested ones, or of several types."""
    return pa.field(name, pa.string(), metadata=_JSON_MARK)


def is_json(field: pa.Field) -> bool:
    """Return whether a column holds JSON values as texts."""
    return (field.metadata or {}).items() >= _JSON_MARK.items()


ReadRow = tuple[dict[str, Any] | None, str | None]
"""The values of a row by column, or None and why it cannot be read; or both."""


def chunk_of_rows(rows: Sequence[ReadRow], texts: Sequence[str], schema: pa.Schema) -> Chunk:
    """Return a chunk of rows of a text file."""
    values = [row or {} for row, _ in rows]
    arrays = [_array([row.get(field.name) for row in values], field) for field in schema]
    kept = pa.RecordBatch.from_arrays(arrays, schema=schema)
    inputs = [tuple(row.get(name) for name in texts) for row in values]
    return Chunk(kept, inputs, [error for _, error in rows])


def _array(values: list[Any], field: pa.Field) -> pa.Array:
    if is_json(field):
        values = [None if value is None else orjson.dumps(value).decode() for value in values]
    elif pa.types.is_floating(field.type):
        values = [None if value is None else float(value) for value in values]
    try:
        return pa.array(values, field.type)
    except UnicodeEncodeError:  # bytes of a CSV file that are not UTF-8
        return pa.array([value and _replaced(value) for value in values], field.type)


def _replaced(text: str) -> str:
    return text.encode(errors="surrogateescape").decode(errors="replace")


def chunk_of_batch(batch: pa.RecordBatch, texts: Sequence[str], schema: pa.Schema) -> Chunk:
    """Return a chunk of rows of a Parquet file; see `chunk_of_rows`."""
    columns = [_texts(batch.column(name)) for name in texts]
    kept = batch.select(schema.names).cast(schema)
    return Chunk(kept, list(zip(*columns, strict=True)), [None] * len(batch))


def _texts(column: pa.Array) -> list[object]:
    """Return the texts of a column; bytes for a text that is not UTF-8."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        texts: list[object] = column.to_pylist()
    except UnicodeDecodeError:
        texts = [_decoded(value) for value in column.cast(pa.large_binary()).to_pylist()]
    return texts


def _decoded(value: bytes | None) -> object:
    try:
        return value if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def grouped(rows: Iterator[ReadRow]) -> Iterator[list[ReadRow]]:
    """Yield the rows in groups of `CHUNK_ROWS`."""
    while group := list(islice(rows, CHUNK_ROWS)):
        yield group
