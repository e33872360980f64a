"""What `cloze serve --model` names: bundles, directories and hub repositories.

A directory or a repository is exported into the store at its first use. A record beside the
bundles has the bundle of each source, and size, time and hash of each file, so that the next start
takes the bundle without reading the files.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloze.model_store.installation import install_command
from cloze.model_store.manifest import NAME_PATTERN, Precision
from cloze.model_store.processor import int8_advantage
from cloze.model_store.store import Store, StoreError

if TYPE_CHECKING:
    from cloze.service.settings import Settings

HUB = "hub:"

_RECORDS = ".sources"
_LARGEST_GROWTH = 3
"""A bundle needs at most this many times the space of the checkpoint's files: its graphs may have
fp32, fp16 and int8 weights."""

Report = Callable[[str], None]

Snapshot = dict[str, list[Any]]
"""Size, time in ns and sha256 of each file, by its path in the folder."""


class SourceError(Exception):
    """A model cannot be served; the message is one line."""


def bundles_to_serve(settings: "Settings", report: Report) -> tuple[str, ...]:
    """Return the bundles of the setting `model`; directories and repositories are exported first.

    Args:
        settings: the operator's settings.
        report: receives progress messages, one line each.

    Raises:
        SourceError: a name has no known form, or what it names cannot be exported.
    """
    for name in settings.model:
        _check_form(name)
    return tuple(
        name if _is_bundle(name) else _exported(name, settings, report) for name in settings.model
    )


def _is_bundle(name: str) -> bool:
    return "/" not in name and not name.startswith((HUB, ".", "~"))


def _check_form(name: str) -> None:
    """Check that a name is that of a bundle, of a directory or of a repository."""
    if "/" in name and not name.startswith((HUB, "./", "../", "/", "~")):
        raise SourceError(
            f"model {name!a} may be a directory or a repository; write ./{name} or {HUB}{name}"
        )


def _exported(name: str, settings: "Settings", report: Report) -> str:
    """Return the bundle of a directory or repository; export it if the store has none of it."""
    store = Store(settings.model_store)
    source, revision, bundle_name = _parts(name)
    precisions = _precisions(settings)
    folder = None if name.startswith(HUB) else Path(source)
    if folder is not None and not folder.is_dir():
        raise SourceError(f"model {name}: there is no directory {folder}")
    record = _Record(store.root, source, revision)
    if (reference := record.bundle(store, folder, precisions)) is not None:
        return reference
    if folder is not None:
        _check_space(store.root, folder)
    extra = "; int8 takes a minute or more" if Precision.INT8 in precisions else ""
    files = _snapshot(folder)
    report(f"exporting {name}, once; it takes some seconds per 10 million parameters{extra}")
    reference = _export(source, revision, bundle_name, store, precisions, report)
    if _is_unchanged(files, folder):  # else a writer was faster, and the next start exports again
        record.write(reference, files, precisions)
    return reference


def _parts(name: str) -> tuple[str, str | None, str]:
    """Return the source, the revision of a repository, and the name of the bundle."""
    if name.startswith(HUB):
        repository, _, revision = name.removeprefix(HUB).partition("@")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            raise SourceError(f"model {name!a} is not {HUB}ORGANISATION/NAME[@REVISION]")
        return HUB + repository, revision or None, _bundle_name(repository.split("/")[1])
    try:
        folder = Path(name).expanduser().resolve()
    except RuntimeError as error:
        raise SourceError(f"model {name}: {error}") from None
    return str(folder), None, _bundle_name(folder.name)


def _bundle_name(name: str) -> str:
    """Return the nearest name that a bundle may have."""
    near = re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("._-")[:64]
    return near if re.fullmatch(NAME_PATTERN, near) else "model"


def _precisions(settings: "Settings") -> tuple[Precision, ...]:
    """Return the precisions to export besides fp32.

    int8 is exported only if the operator asks for it: its quality gate takes a minute or more.
    """
    if settings.precision != "auto":
        chosen = Precision(settings.precision)
        return () if chosen is Precision.FP32 else (chosen,)
    return (Precision.FP16,) if settings.device == "cuda" or _auto_is_cuda(settings) else ()


def _auto_is_cuda(settings: "Settings") -> bool:
    if settings.device != "auto":
        return False
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return False
    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def _check_space(root: Path, folder: Path) -> None:
    """Refuse an export that the disk has no space for."""
    needed = _LARGEST_GROWTH * sum(file.stat().st_size for file in _files(folder))
    existing = next(parent for parent in (root, *root.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise SourceError(
            f"the export of {folder} may need {needed >> 20} MiB, but {root} has {free >> 20} MiB "
            "free; set CLOZE_MODEL_STORE to a folder with more"
        )


def _export(
    source: str,
    revision: str | None,
    name: str,
    store: Store,
    precisions: tuple[Precision, ...],
    report: Report,
) -> str:
    try:
        from cloze.export.errors import ExportError
        from cloze.export.publish import ExportOptions, export
    except ModuleNotFoundError as error:
        raise SourceError(
            f"{source} is no bundle yet, and to export it needs {error.name}, which the serving "
            f"install leaves out; install it with: {install_command('export')}"
        ) from error
    try:
        options = ExportOptions(revision=revision, precisions=precisions)
        bundle = export(source, name, store, options, report)
    except (ExportError, StoreError) as error:
        raise SourceError(f"model {source}: {error}") from error
    report(f"exported {source} as {bundle.manifest.reference} to {bundle.path}")
    if not precisions and (instructions := int8_advantage()):
        report(
            f"  note: int8 is faster on this processor ({instructions}); for it, serve with "
            "--precision int8 once"
        )
    return bundle.manifest.reference


class _Record:
    """What was exported from a source, in a file of the store.

    Args:
        root: the folder of the store.
        source: a directory, or ``hub:`` and a repository.
        revision: the revision of a repository.
    """

    def __init__(self, root: Path, source: str, revision: str | None) -> None:
        self._key = {"source": source, "revision": revision}
        digest = hashlib.sha256(json.dumps(self._key).encode()).hexdigest()[:32]
        self._file = root / _RECORDS / f"{digest}.json"

    def bundle(
        self, store: Store, folder: Path | None, precisions: Sequence[Precision]
    ) -> str | None:
        """Return the recorded bundle; None if there is none, or the source has changed since.

        Args:
            store: the store.
            folder: the source's directory; None for a repository, whose commit was recorded.
            precisions: the precisions that the bundle must have besides fp32.
        """
        try:
            recorded = json.loads(self._file.read_text())
            reference: str = recorded["bundle"]
            files: dict[str, list[Any]] = recorded["files"]
            store.resolve(reference)
            if not set(precisions) <= set(recorded["precisions"]):
                return None
        except (OSError, ValueError, KeyError, TypeError, StoreError):
            return None
        if folder is None:
            return reference
        found = {str(file.relative_to(folder)): file for file in _files(folder)}
        if found.keys() != files.keys():
            return None
        changed = [name for name, file in found.items() if _stamp(file) != files[name][:2]]
        try:
            if any(_sha256(found[name]) != files[name][2] for name in changed):
                return None
        except OSError:
            return None  # the export tells what cannot be read
        if changed:
            self.write(reference, _snapshot(folder), recorded["precisions"])
        return reference

    def write(self, reference: str, files: Snapshot, precisions: Sequence[str]) -> None:
        """Record the bundle of the source; without space for it, the next start exports again."""
        temporary = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            made = {"bundle": reference, "precisions": list(precisions), "files": files}
            temporary.write_text(json.dumps(self._key | made))
            temporary.replace(self._file)
        except OSError:
            temporary.unlink(missing_ok=True)


def _snapshot(folder: Path | None) -> Snapshot:
    """Return size, time and hash of each file of a checkpoint; nothing for a repository.

    Raises:
        SourceError: a file cannot be read.
    """
    if folder is None:
        return {}
    try:
        return {
            str(file.relative_to(folder)): [*_stamp(file), _sha256(file)] for file in _files(folder)
        }
    except OSError as error:
        raise SourceError(f"model {folder}: {error.filename}: {error.strerror}") from None


def _is_unchanged(files: Snapshot, folder: Path | None) -> bool:
    """Return whether the files still have their sizes and times."""
    if folder is None:
        return True
    found = {str(file.relative_to(folder)): _stamp(file) for file in _files(folder)}
    return found == {name: values[:2] for name, values in files.items()}


def _files(folder: Path) -> Sequence[Path]:
    """Return the files that an export may read: those of the folder itself and of its modules."""
    modules = folder / "modules.json"
    names: list[str] = [""]
    # Without the file, or with a malformed one, the export reads only the folder itself.
    with suppress(OSError, ValueError, KeyError, TypeError):
        names += [module["path"] for module in json.loads(modules.read_text())]
    return sorted({file for name in names for file in (folder / name).glob("*") if file.is_file()})


def _stamp(file: Path) -> list[int]:
    """Return the size and the time of a file."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
