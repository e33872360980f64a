"""The plan of a run: the input files, their columns, and the shards of rows."""

import base64
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar

import pyarrow as pa

V = TypeVar("V", bound=Hashable)


class FileFormat(StrEnum):
    """A format of input or output files."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    CSV = "csv"
    TSV = "tsv"

    @property
    def delimiter(self) -> str | None:
        """The character between the fields of a table of text; None for other formats."""
        return {FileFormat.CSV: ",", FileFormat.TSV: "\t"}.get(self)


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file, as it was when the run was planned.

    Attributes:
        path: the absolute path.
    """

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Neighbouring rows of one input file, whose results are one output file.

    Attributes:
        first_row: index of the first row in the file.
        start: first byte of the rows in a text file; 0 for Parquet.
        end: byte after the rows in a text file; 0 for Parquet.
    """

    number: int
    file: int
    first_row: int
    rows: int
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The input of a run, divided into shards."""

    format: FileFormat
    files: tuple[InputFile, ...]
    schema: pa.Schema
    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        """Number of rows of the input."""
        return sum(shard.rows for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "format": str(self.format),
            "files": [asdict(file) for file in self.files],
            "schema": base64.b64encode(self.schema.serialize()).decode(),
            "shards": [[s.file, s.first_row, s.rows, s.start, s.end] for s in self.shards],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the plan that `to_json` wrote."""
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(values["schema"])))
        return cls(
            FileFormat(values["format"]),
            tuple(InputFile(**file) for file in values["files"]),
            schema,
            tuple(Shard(number, *shard) for number, shard in enumerate(values["shards"])),
        )


def first_doubled(values: Iterable[V]) -> V | None:
    """Return the first value that an earlier one equals; None if all differ."""
    seen: set[V] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
