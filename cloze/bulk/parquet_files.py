"""Rows of Parquet files. A file is read in pieces, whatever the size of its row groups."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cloze.bulk.chunks import CHUNK_ROWS
from cloze.bulk.errors import BulkError

_BUFFER_BYTES = 2**20
"""Bytes of a column that are read at once; without a buffer, a whole row group is."""


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises:
        BulkError: the file is not a Parquet file.
        OSError: the file cannot be read.
    """
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except pa.ArrowInvalid as error:
        raise BulkError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from None


class ParquetReader:
    """Reads ranges of rows. A range that follows the last one goes on where that one ended."""

    def __init__(self) -> None:
        self._key: tuple[Path, tuple[str, ...]] | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._position = 0

    def read(
        self, path: Path, columns: Sequence[str], first: int, rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the columns of some rows, in batches of at most `CHUNK_ROWS` rows."""
        key = (path, tuple(columns))
        if key != self._key or first < self._position:
            self._open(path, columns, first)
        self._key = key
        while rows:
            batch = self._rest or next(self._batches)
            skipped = min(first - self._position, len(batch))
            taken = min(rows, len(batch) - skipped)
            if taken:
                yield batch.slice(skipped, taken)
            used = skipped + taken
            self._rest = batch.slice(used) if used < len(batch) else None
            self._position += used
            first, rows = first + taken, rows - taken

    def _open(self, path: Path, columns: Sequence[str], first: int) -> None:
        """Begin with the row group that has the row `first`."""
        file = open_parquet(path)
        self._position, group = 0, 0
        while self._position + (size := file.metadata.row_group(group).num_rows) <= first:
            self._position += size
            group += 1
        groups = range(group, file.num_row_groups)
        self._rest = None
        self._batches = file.iter_batches(CHUNK_ROWS, groups, columns=list(columns))
