"""The output folder of a run: which results it is for, and which shards are complete.

    <output>/_manifest.json         the run: its inputs, its model, its options, and its shards
    <output>/_reports/00000.json    the report of shard 0
    <output>/_reports/lock          locked by the process that writes to the folder
    <output>/part-00000.parquet     the results of shard 0, or of its last rows, complete
    <output>/part-00000-000000256.parquet  of its rows up to row 256, if the shard takes long
    <output>/_part-00000-<random>   results that are not complete, which no reader opens

A complete file gets its name by one ``rename``. Readers of folders, such as Arrow and Spark, leave
out names that begin with an underscore.
"""

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cloze.bulk.errors import BulkError
from cloze.bulk.plan import FileFormat, InputFile, Plan, Shard
from cloze.model_store.system import locked, sync

_MANIFEST = "_manifest.json"
_REPORTS = "_reports"
_LOCK = "lock"
_UNFINISHED = "_part-"


@dataclass(slots=True)
class ShardReport:
    """What became of the rows of a shard so far.

    Attributes:
        rows: number of rows that are written.
        errors: number of rows that have an error instead of a result.
        truncated: number of rows whose text was cut.
        tokens: number of tokens that the engine ran.
        first_error: the first error with its row; "" without errors.
        embedding_space: name of the space of the vectors; "" without vectors.
        files: number of files that have the rows.
    """

    shard: int
    rows: int
    errors: int
    truncated: int
    tokens: int
    precision: str
    first_error: str = ""
    embedding_space: str = ""
    files: int = 1


class RunFolder:
    """The output folder of a run."""

    def __init__(self, path: Path, file_format: FileFormat) -> None:
        self.path, self._format = path, file_format

    def result(self, shard: Shard) -> Path:
        """Return the file of a shard's results."""
        return self.path / f"part-{shard.number:05d}.{self._format}"

    def is_complete(self, shard: Shard) -> bool:
        """Return whether a shard has its results."""
        return self.result(shard).exists()

    def unfinished(self, shard: Shard) -> Path:
        """Return a new name for results that are not complete."""
        return self.path / f"{_UNFINISHED}{shard.number:05d}-{secrets.token_hex(8)}"

    def complete(
        self, unfinished: Path, shard: Shard, report: ShardReport, *, is_last: bool = True
    ) -> None:
        """Give results their name, after the report of the shard's rows up to their end.

        Args:
            is_last: whether the shard has no further rows.
        """
        result = self.result(shard)
        if not is_last:
            result = result.with_stem(f"{result.stem}-{report.rows:09d}")
        _write_synced(self._report(result), json.dumps(asdict(report)))
        sync(unfinished)
        unfinished.replace(result)
        sync(self.path)

    def report(self, shard: Shard) -> ShardReport:
        """Return the report of a complete shard.

        Raises:
            BulkError: the report was removed or changed.
        """
        return self._read_report(self.result(shard))

    def begun(self, shard: Shard) -> ShardReport | None:
        """Return the report of a shard's rows that an earlier run wrote; None: it wrote none.

        Raises:
            BulkError: the report was removed or changed.
        """
        result = self.result(shard)
        parts = sorted(self.path.glob(f"{result.stem}-*{result.suffix}"))
        return self._read_report(parts[-1]) if parts else None

    def _read_report(self, result: Path) -> ShardReport:
        file = self._report(result)
        try:
            return ShardReport(**json.loads(file.read_bytes()))
        except (OSError, ValueError, TypeError):
            raise BulkError(f"{file} is missing or damaged; remove {result}") from None

    def _report(self, result: Path) -> Path:
        return self.path / _REPORTS / f"{result.stem.removeprefix('part-')}.json"

    def recorded_plan(self, files: Sequence[InputFile], shard_rows: int) -> Plan | None:
        """Return the recorded plan; None if there is none of these files and rows per shard."""
        recorded = self._recorded()
        if recorded is None or recorded["identity"].get("rows per shard") != shard_rows:
            return None
        plan = Plan.from_json(recorded["plan"])
        return plan if list(plan.files) == list(files) else None

    def _recorded(self) -> dict[str, Any] | None:
        file = self.path / _MANIFEST
        try:
            values: dict[str, Any] = json.loads(file.read_bytes())
            values["identity"], values["plan"]["shards"]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BulkError(f"{file} is damaged ({error}); give another --output") from None
        return values

    def begin(self, identity: dict[str, Any], plan: Plan) -> None:
        """Assign the locked folder to a run, or check that the folder belongs to this run.

        A folder without results may be assigned to another run.

        Raises:
            BulkError: the folder cannot be written, or belongs to another run.
        """
        try:
            for file in self.path.glob(f"{_UNFINISHED}*"):
                file.unlink(missing_ok=True)
            recorded = self._recorded()
            if recorded is not None and any(self.path.glob("part-*")):
                _check_identity(self.path, recorded["identity"], identity)
                return
            values = {"identity": identity, "plan": plan.to_json()}
            _write_synced(self.path / _MANIFEST, json.dumps(values))
        except OSError as error:
            raise BulkError(f"cannot write to {self.path}: {error.strerror}") from None

    def check_content(self) -> None:
        """Check that the folder is new, empty, or of a run.

        Raises:
            BulkError: it has other content.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BulkError(f"{self.path} is a file; --output is a folder")
        has_content = self.path.is_dir() and any(
            file.name != _REPORTS for file in self.path.iterdir()
        )
        if has_content and self._recorded() is None:
            raise BulkError(
                f"{self.path} has other content, and no {_MANIFEST}; give another --output"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other runs out of it.

        Raises:
            BulkError: the folder cannot be made, or another run writes to it.
        """
        try:
            (self.path / _REPORTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BulkError(f"cannot write to {self.path}: {error.strerror}") from None
        with locked(self.path / _REPORTS / _LOCK, self._refuse):
            yield

    def _refuse(self) -> None:
        raise BulkError(f"another run writes to {self.path}")


def _check_identity(folder: Path, recorded: dict[str, Any], identity: dict[str, Any]) -> None:
    # Through JSON, because tuples become lists there.
    identity = json.loads(json.dumps(identity))
    for name, value in identity.items():
        if recorded.get(name) != value:
            was, now = _shown(name, recorded.get(name), value)
            raise BulkError(
                f"{folder} has results of another run: its {name} was {was}, and is now {now}; "
                "give another --output, or the same arguments"
            )


def _shown(name: str, recorded: Any, value: Any) -> tuple[str, str]:
    """Return what differs between two values of an identity."""
    if name != "inputs":
        return json.dumps(recorded), json.dumps(value)
    before, now = ({tuple(file) for file in files} for files in (recorded, value))
    return _files(before - now), _files(now - before)


def _files(files: set[tuple[Any, ...]]) -> str:
    if not files:
        return "without it"
    path, size, mtime_ns = min(files)
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{path} ({size} bytes, changed at {mtime_ns / 1e9:.6f}){more}"


def _write_synced(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    unfinished = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    unfinished.write_text(text)
    sync(unfinished)
    unfinished.replace(file)
