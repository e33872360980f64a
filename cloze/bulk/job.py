"""A bulk job: everything that a worker needs to turn a shard into a file, on any machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from cloze.bulk.errors import BulkError
from cloze.bulk.plan import FileFormat, Plan, first_doubled
from cloze.bulk.sources import check_column, check_text_column
from cloze.bulk.tasks import BULK_TASKS, BulkTask
from cloze.model_store import Bundle, Store
from cloze.service.models.adapters import AdapterBundle, open_adapters
from cloze.service.settings import Settings


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What the user asks for.

    Attributes:
        columns: names of the text columns, in the order of the task's inputs.
        id_column: the only column of the input to keep; None: all.
    """

    command: str
    columns: tuple[str, ...]
    parameters: dict[str, Any]
    id_column: str | None
    prefix: str
    format: FileFormat
    shard_rows: int

    @property
    def task(self) -> BulkTask:
        """The bulk task."""
        return BULK_TASKS[self.command]


@dataclass(frozen=True, slots=True)
class BulkJob:
    """A job.

    Attributes:
        model: full name of the bundle; of the base, if an adapter of the settings answers.
        digest: digest of what answers; see `base_and_digest`.
    """

    options: JobOptions
    model: str
    digest: str
    settings: Settings
    plan: Plan
    output: Path

    @property
    def kept(self) -> pa.Schema:
        """The columns of the input that the output keeps."""
        if self.options.id_column is None:
            return self.plan.schema
        return pa.schema([self.plan.schema.field(self.options.id_column)])

    @property
    def schema(self) -> pa.Schema:
        """The columns of the output."""
        task, prefix = self.options.task, self.options.prefix
        results = (
            (task.result, task.type),
            ("tokens", pa.int32()),
            ("truncated", pa.bool_()),
            ("error", pa.string()),
        )
        return pa.schema([*self.kept, *(pa.field(prefix + name, kind) for name, kind in results)])

    def identity(self) -> dict[str, Any]:
        """Return what a resumed run must have in common with the one that began."""
        options, settings = self.options, self.settings
        return {
            "task": options.command,
            "inputs": [[file.path, file.size, file.mtime_ns] for file in self.plan.files],
            "model": [self.model, self.digest],
            "columns": list(options.columns),
            "parameters": options.parameters,
            "id column": options.id_column,
            "prefix": options.prefix,
            "output format": str(options.format),
            "rows per shard": options.shard_rows,
            "device and precision": [str(settings.device), str(settings.precision)],
        }

    def check_columns(self) -> None:
        """Check that the input has the columns that the job reads, and none that it writes.

        Raises:
            BulkError: it has not, or it has one.
        """
        for name in self.options.columns:
            check_text_column(self.plan.schema, name)
        if self.options.id_column is not None:
            check_column(self.plan.schema, self.options.id_column)
        if (taken := first_doubled(self.schema.names)) is not None:
            raise BulkError(
                f"the input has a column {taken!a}, as the results have; give --prefix, or "
                "--id-column"
            )


def open_model(settings: Settings, reference: str) -> list[Bundle]:
    """Return a bundle, and the adapter of the settings if there is one; the last one answers.

    Raises:
        StoreError: the bundle does not open.
        StartupError: the adapter does not.
    """
    bundle = Store(settings.model_store).open(reference)
    adapters = open_adapters(settings.adapter, [bundle], settings.adapter_memory_mb)
    return [bundle, *adapters.bundles]


def base_and_digest(bundle: Bundle) -> tuple[str, str]:
    """Return the full name of the bundle that an engine opens, and the digest of what answers."""
    if isinstance(bundle, AdapterBundle):
        base = bundle.base.manifest
        return base.reference, f"{base.digest} {bundle.key}"
    return bundle.manifest.reference, bundle.manifest.digest
