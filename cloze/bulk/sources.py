"""The input of a run: finds its files, and divides their rows into shards."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from cloze.bulk import text_files
from cloze.bulk.chunks import Chunk, chunk_of_batch, chunk_of_rows, grouped
from cloze.bulk.errors import BulkError
from cloze.bulk.parquet_files import ParquetReader, open_parquet
from cloze.bulk.plan import FileFormat, InputFile, Plan, Shard, first_doubled
from cloze.bulk.text_files import ColumnTypes

_SUFFIXES = {
    ".parquet": FileFormat.PARQUET,
    ".jsonl": FileFormat.JSONL,
    ".ndjson": FileFormat.JSONL,
    ".csv": FileFormat.CSV,
    ".tsv": FileFormat.TSV,
}

_KNOWN = "Parquet (.parquet), JSON lines (.jsonl, .ndjson), CSV (.csv) and TSV (.tsv) are read"


def input_files(paths: Sequence[Path]) -> tuple[FileFormat, list[InputFile]]:
    """Return the files of a run, in order, and their format.

    Raises:
        BulkError: a path does not exist, there is no file, or the formats are unknown or differ.
    """
    files = [file.resolve() for path in paths for file in _files(path)]
    if not files:
        raise BulkError(f"{', '.join(map(str, paths))} has no file to read; {_KNOWN}")
    if (doubled := first_doubled(files)) is not None:
        raise BulkError(f"{doubled} is named twice")
    formats = dict.fromkeys(_format(file) for file in files)
    if len(formats) > 1:
        raise BulkError(f"the files have several formats: {', '.join(formats)}; run one at a time")
    return next(iter(formats)), [_described(file) for file in files]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise BulkError(f"no file or folder {path}")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
    return [file for file in files if file.is_file() and not _is_hidden(file.relative_to(path))]


def _is_hidden(path: Path) -> bool:
    """Return whether readers of folders leave a file out, as Spark and Arrow do."""
    return any(part.startswith((".", "_")) for part in path.parts)


def _format(file: Path) -> FileFormat:
    if file.suffix not in _SUFFIXES:
        raise BulkError(f"{file} has an unknown format; {_KNOWN}")
    return _SUFFIXES[file.suffix]


def _described(file: Path) -> InputFile:
    status = file.stat()
    return InputFile(str(file), status.st_size, status.st_mtime_ns)


def make_plan(
    file_format: FileFormat,
    files: Sequence[InputFile],
    shard_rows: int,
    report: Callable[[str], None],
) -> Plan:
    """Divide the rows of the files into shards. A text file is read once for this.

    Raises:
        BulkError: a file cannot be read, or the files have different columns.
    """
    try:
        if file_format is FileFormat.PARQUET:
            return _plan_parquet(files, shard_rows)
        if (size := sum(file.size for file in files)) > 2**30:
            report(f"finding the rows of {size / 2**30:.1f} GiB of text")
        return _plan_text(file_format, files, shard_rows)
    except OSError as error:
        # Errors of pyarrow have no name of a file; their message has one.
        problem = f"{error.filename} cannot be read: {error.strerror}"
        raise BulkError(problem if error.filename else f"cannot read the input: {error}") from None


def _plan_parquet(files: Sequence[InputFile], shard_rows: int) -> Plan:
    schema: pa.Schema | None = None
    shards: list[Shard] = []
    for index, file in enumerate(files):
        parquet = open_parquet(Path(file.path))
        own = parquet.schema_arrow.remove_metadata()
        if (doubled := first_doubled(own.names)) is not None:
            raise BulkError(f"{file.path} has two columns named {doubled!a}")
        if schema is None:
            schema = own
        elif not own.equals(schema):
            raise BulkError(_differing(files[0], schema, file, own))
        total = parquet.metadata.num_rows
        for first in range(0, total, shard_rows):
            rows = min(shard_rows, total - first)
            shards.append(Shard(len(shards), index, first, rows))
    assert schema is not None
    return Plan(FileFormat.PARQUET, tuple(files), schema, tuple(shards))


def _plan_text(file_format: FileFormat, files: Sequence[InputFile], shard_rows: int) -> Plan:
    types, header = ColumnTypes(), None
    shards: list[Shard] = []
    for index, file in enumerate(files):
        ranges, own = text_files.scan(Path(file.path), file_format, shard_rows, types)
        if own is not None:
            schema = pa.schema([pa.field(name, pa.string()) for name in own])
            if header is not None and not schema.equals(header):
                raise BulkError(_differing(files[0], header, file, schema))
            header = schema
        first = 0
        for place in ranges:
            shards.append(Shard(len(shards), index, first, *place))
            first += place.rows
    columns = types.schema() if header is None else header
    return Plan(file_format, tuple(files), columns, tuple(shards))


def _differing(first: InputFile, schema: pa.Schema, other: InputFile, own: pa.Schema) -> str:
    if schema.names != own.names:
        differ = f"{', '.join(own.names)} instead of {', '.join(schema.names)}"
    else:
        name = next(n for n in own.names if not own.field(n).equals(schema.field(n)))
        differ = f"{name} as {own.field(name).type} instead of {schema.field(name).type}"
    return f"{other.path} has other columns than {first.path}: {differ}"


class ShardReader:
    """Reads the rows of shards."""

    def __init__(self, plan: Plan, texts: Sequence[str], kept: pa.Schema) -> None:
        self._plan, self._texts, self._kept = plan, texts, kept
        self._columns = list(dict.fromkeys([*kept.names, *texts]))
        self._parquet = ParquetReader()

    def read(self, shard: Shard, skipped: int = 0) -> Iterator[Chunk]:
        """Yield the rows of a shard, except the first ``skipped`` rows.

        Raises:
            BulkError: the file is not what it was when the run was planned.
        """
        file = self._plan.files[shard.file]
        path = Path(file.path)
        try:
            if _described(path) != file:
                raise BulkError(f"{path} has changed since the run began")
            rows = skipped
            for chunk in self._chunks(path, shard, skipped):
                rows += len(chunk)
                yield chunk
        except OSError as error:
            raise BulkError(f"{path} cannot be read: {error.strerror or error}") from None
        if rows != shard.rows:
            raise BulkError(f"{path} has changed since the run began")

    def _chunks(self, path: Path, shard: Shard, skipped: int) -> Iterator[Chunk]:
        if self._plan.format is FileFormat.PARQUET:
            first, count = shard.first_row + skipped, shard.rows - skipped
            batches = self._parquet.read(path, self._columns, first, count)
            for batch in batches:
                yield chunk_of_batch(batch, self._texts, self._kept)
            return
        place = text_files.Range(shard.rows, shard.start, shard.end)
        rows = text_files.read(path, self._plan.format, place, self._plan.schema.names)
        for group in grouped(islice(rows, skipped, None)):
            yield chunk_of_rows(group, self._texts, self._kept)


def check_text_column(schema: pa.Schema, name: str) -> None:
    """Check that a column can hold texts.

    Raises:
        BulkError: there is no such column, or it holds something else.
    """
    check_column(schema, name)
    field = schema.field(name)
    value: Any = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    is_text = any(
        check(value)
        for check in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_null,
        )
    )
    if not is_text:
        raise BulkError(f"the column {name!a} is {field.type}, not text")


def check_column(schema: pa.Schema, name: str) -> None:
    """Check that the input has a column.

    Raises:
        BulkError: it has no such column.
    """
    if name not in schema.names:
        known = ", ".join(schema.names) or "none"
        raise BulkError(f"the input has no column {name!a} (columns: {known})")
