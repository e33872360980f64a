"""Records of what was exported or fetched: beside the bundles, one file per source.

A record has the bundle of its source, and the size, time and hash of each file of a directory, so
that the next start takes the bundle without reading the files.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from cloze.model_store.manifest import Precision
from cloze.model_store.plain_files import sha256_of
from cloze.model_store.store import Store, StoreError
from cloze.model_store.system import locked

_RECORDS, _LOCK = ".sources", ".lock"

Snapshot = dict[str, list[Any]]
"""Size, time in ns and sha256 of each file, by its path in the folder."""


class SourceRecord:
    """What was exported or fetched from a source, in a file of the store.

    Args:
        source: a directory, an address, or ``hub:`` and a repository.
        shown: the source without secrets, for the file; None: it has none.
    """

    def __init__(
        self, root: Path, source: str, revision: str | None, shown: str | None = None
    ) -> None:
        key = {"source": source, "revision": revision}
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        self._key = key | {"source": shown or source}
        self._file = root / _RECORDS / f"{digest}.json"

    def bundle(
        self, store: Store, folder: Path | None, precisions: Sequence[Precision]
    ) -> str | None:
        """Return the recorded bundle; None if there is none, or the source has changed since.

        Args:
            folder: the source's directory; None for a repository, whose commit was recorded.
            precisions: the precisions that the bundle must have besides fp32.
        """
        recorded = self._read(store, precisions)
        if recorded is None or folder is None:
            return None if recorded is None else str(recorded["bundle"])
        reference, files = str(recorded["bundle"]), recorded["files"]
        found = {str(file.relative_to(folder)): file for file in files_to_export(folder)}
        if found.keys() != files.keys():
            return None
        changed = [name for name, file in found.items() if _stamp(file) != files[name][:2]]
        try:
            if any(sha256_of(found[name]) != files[name][2] for name in changed):
                return None
            if changed:
                self.write(reference, snapshot(folder), recorded["precisions"])
        except OSError:
            return None  # the export tells what cannot be read
        return reference

    def fetched(
        self, store: Store, sha256: str | None, precisions: Sequence[Precision]
    ) -> str | None:
        """Return the bundle that was fetched; None if there is none, or its hash is another one.

        Args:
            sha256: the expected hash; None accepts any.
            precisions: the precisions that an exported bundle must have besides fp32.
        """
        recorded = self._read(store, precisions)
        if recorded is None or sha256 not in (None, recorded.get("sha256")):
            return None
        return str(recorded["bundle"])

    def _read(self, store: Store, precisions: Sequence[Precision]) -> dict[str, Any] | None:
        """Return the record if its bundle is in the store and has the precisions."""
        try:
            recorded: dict[str, Any] = json.loads(self._file.read_bytes())
            store.resolve(recorded["bundle"])
            dict(recorded["files"])
            # A bundle that was fetched as one has the precisions that it has.
            if recorded["precisions"] is not None and not set(precisions) <= set(
                recorded["precisions"]
            ):
                return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StoreError):
            return None
        return recorded

    def write(
        self,
        reference: str,
        files: Snapshot,
        precisions: Sequence[str] | None,
        sha256: str | None = None,
    ) -> None:
        """Record the bundle of the source; without space for it, the next start exports again."""
        temporary = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            kept = None if precisions is None else list(precisions)
            made = {"bundle": reference, "precisions": kept, "files": files, "sha256": sha256}
            temporary.write_text(json.dumps(self._key | made))
            temporary.replace(self._file)
        except OSError:
            temporary.unlink(missing_ok=True)


def one_at_a_time(root: Path, waits: Callable[[], None]) -> AbstractContextManager[None]:
    """Let one process at a time add a model to a store; the others wait.

    Without a lock (see `locked`), nobody waits, and two processes may add one model twice.

    Args:
        root: the folder of the store, created if missing.
        waits: called before this process waits for another one.
    """
    with suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
    return locked(root / _LOCK, waits)


def snapshot(folder: Path) -> Snapshot:
    """Return size, time and hash of each file of a checkpoint.

    Raises:
        OSError: a file cannot be read.
    """
    return {
        str(file.relative_to(folder)): [*_stamp(file), sha256_of(file)]
        for file in files_to_export(folder)
    }


def is_unchanged(files: Snapshot, folder: Path) -> bool:
    """Return whether the files still have their sizes and times."""
    found = {str(file.relative_to(folder)): _stamp(file) for file in files_to_export(folder)}
    return found == {name: values[:2] for name, values in files.items()}


def files_to_export(folder: Path) -> Sequence[Path]:
    """Return the files that an export may read: those of the folder itself and of its modules.

    Those of the snapshots too if the folder is one of the hub's cache.
    """
    files: set[Path] = set()
    for top in (folder, *folder.glob("snapshots/*")):
        names: list[str] = [""]
        # Without the file, or with a malformed one, the export reads only the folder itself.
        with suppress(OSError, ValueError, KeyError, TypeError):
            modules = json.loads((top / "modules.json").read_bytes())
            names += [module["path"] for module in modules]
        files |= {file for name in names for file in (top / name).glob("*") if file.is_file()}
    return sorted(files)


def _stamp(file: Path) -> list[int]:
    """Return the size and the time of a file."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]
