"""What `cloze serve --model` names: bundles, directories, hub repositories and addresses.

A directory or a repository is exported into the store at its first use, and what an address names
is fetched into the store. A record beside the bundles has the bundle of each source.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cloze.model_store.installation import install_command
from cloze.model_store.manifest import NAME_PATTERN, Manifest, Precision
from cloze.model_store.processor import int8_advantage
from cloze.model_store.store import Store, StoreError
from cloze.source_records import (
    SourceRecord,
    files_to_export,
    is_unchanged,
    one_at_a_time,
    snapshot,
)

if TYPE_CHECKING:
    from cloze.service.settings import Settings

HUB = "hub:"

_LARGEST_GROWTH = 3
"""A bundle needs at most this many times the space of the checkpoint's files: its graphs may have
fp32, fp16 and int8 weights."""

Report = Callable[[str], None]


class SourceError(Exception):
    """A model cannot be served; the message is one line."""


def bundles_to_serve(settings: "Settings", report: Report) -> tuple[str, ...]:
    """Return the bundles of the setting `model`; directories and repositories are exported first.

    Raises:
        SourceError: a name has no known form, or what it names cannot be exported.
    """
    for name in settings.model:
        _check_form(name)
    return tuple(_bundle(name, settings, report) for name in settings.model)


def _bundle(name: str, settings: "Settings", report: Report) -> str:
    """Return the bundle of a name; export or fetch the name's model first if the store lacks it."""
    if "/" not in name and not name.startswith((HUB, ".", "~")):
        return name
    return (_fetched if _is_address(name) else _exported)(name, settings, report)


def _is_address(name: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*://", name) is not None


def _check_form(name: str) -> None:
    """Check that a name is that of a bundle, of a directory, of a repository or an address."""
    if _is_address(name):
        parse_address(name)
    elif "/" in name and not name.startswith((HUB, "./", "../", "/", "~")):
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
    record = SourceRecord(store.root, source, revision)

    def made() -> str | None:
        return record.bundle(store, folder, precisions)

    def make() -> str:
        if folder is not None:
            _check_space(store.root, folder)
        extra = "; int8 takes a minute or more" if Precision.INT8 in precisions else ""
        files = {} if folder is None else _snapshot(folder)
        if folder is not None and _is_bundle(folder):
            reference = _adopted(folder, store)
            report(f"copied the bundle {folder} as {reference}")
            record.write(reference, files, None)
            return reference
        report(f"exporting {name}, once; it takes some seconds per 10 million parameters{extra}")
        reference = _export(source, revision, bundle_name, store, precisions, report)
        # Otherwise a writer was faster, and the next start exports again.
        if folder is None or is_unchanged(files, folder):
            record.write(reference, files, precisions)
        return reference

    return _made_once(store.root, made, make, name, report)


def _is_bundle(folder: Path) -> bool:
    """Return whether a folder is a bundle rather than a checkpoint."""
    return (folder / "manifest.json").is_file() and not (folder / "config.json").exists()


def _adopted(folder: Path, store: Store) -> str:
    """Copy a bundle into the store, under its own name and version."""
    try:
        with store.staging() as staging:
            copy = Path(shutil.copytree(folder, staging / "bundle"))
            return store.adopt(copy).manifest.reference
    except (OSError, StoreError) as error:
        raise SourceError(f"model {folder}: {error}") from error


def _made_once(
    root: Path,
    made: Callable[[], str | None],
    make: Callable[[], str],
    name: str,
    report: Report,
) -> str:
    """Return the bundle of a source; make it unless it is there or another process makes it."""
    if (reference := made()) is not None:
        return reference
    with one_at_a_time(
        root, lambda: report(f"{name} waits until another process has added a model")
    ):
        return made() or make()


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an archive or of a folder, with the expected hash.

    Attributes:
        sha256: the hash in hexadecimal digits; None accepts any.
    """

    url: str
    sha256: str | None

    @property
    def shown(self) -> str:
        """The address without a password and without a query, which may be a signature."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()

    @property
    def bundle_name(self) -> str:
        """The name of the bundle if the address names a checkpoint."""
        last = urlsplit(self.url).path.rstrip("/").rpartition("/")[2] or urlsplit(self.url).netloc
        return _bundle_name(re.sub(r"\.(tar\.gz|tgz|tar\.zst)$", "", last))


def parse_address(name: str) -> Address:
    """Return the address that a name states as ``URL`` or ``URL#sha256=HEX``.

    Raises:
        SourceError: the name has another fragment.
    """
    url, _, fragment = name.partition("#")
    if not fragment:
        return Address(url, None)
    if not re.fullmatch(r"sha256=[0-9a-fA-F]{64}", fragment):
        shown = Address(url, None).shown
        raise SourceError(f"model {shown}: write #sha256= and 64 hexadecimal digits after it")
    return Address(url, fragment.removeprefix("sha256=").lower())


def _fetched(name: str, settings: "Settings", report: Report) -> str:
    """Return the bundle of an address; fetch it if the store has none of it."""
    address, store, precisions = (
        parse_address(name),
        Store(settings.model_store),
        _precisions(settings),
    )
    # With a hash, another signature in the address does not mean another model.
    source = address.shown if address.sha256 else address.url
    record = SourceRecord(store.root, source, None, address.shown)
    return _made_once(
        store.root,
        lambda: record.fetched(store, address.sha256, precisions),
        lambda: _fetch(address, store, precisions, record, report),
        address.shown,
        report,
    )


def _fetch(
    address: Address,
    store: Store,
    precisions: tuple[Precision, ...],
    record: SourceRecord,
    report: Report,
) -> str:
    """Fetch what an address names into the store, and record it."""
    try:
        from cloze.export.errors import ExportError
        from cloze.fetch import fetch_model
    except ModuleNotFoundError as error:
        raise SourceError(
            f"model {address.shown} is not in {store.root}, and to fetch it needs {error.name}, "
            "which the serving install leaves out; run `cloze fetch` where the extra export is "
            f"installed, or install it with: {install_command('export')}"
        ) from None
    report(f"fetching {address.shown}, once")
    try:
        with store.staging() as folder:
            model = fetch_model(address.url, address.sha256, folder)
            if model.is_bundle:
                reference = store.adopt(model.folder).manifest.reference
            else:
                source, bundle_name = str(model.folder), address.bundle_name
                reference = _export(source, None, bundle_name, store, precisions, report)
    except (ExportError, StoreError) as error:
        raise SourceError(f"model {address.shown}: {error}") from error
    except ModuleNotFoundError as error:
        raise SourceError(
            f"model {address.shown}: to fetch it needs {error.name}; install it with: "
            f"{install_command('export')}"
        ) from None
    report(f"fetched {address.shown} as {reference}; sha256 {model.sha256}")
    record.write(reference, {}, None if model.is_bundle else precisions, model.sha256)
    return reference


def _snapshot(folder: Path) -> dict[str, list[Any]]:
    try:
        return snapshot(folder)
    except OSError as error:
        raise SourceError(f"model {folder}: {error.filename}: {error.strerror}") from None


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
    needed = _LARGEST_GROWTH * sum(file.stat().st_size for file in files_to_export(folder))
    existing = next(parent for parent in (root, *root.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise SourceError(
            f"the export of {folder} may need {needed >> 20} MiB, but {root} has {free >> 20} MiB "
            "free; set CLOZE_MODEL_STORE to a folder with more"
        )


def offered(manifest: Manifest) -> str:
    """Return the names of the tasks that a bundle does."""
    from cloze.service.tasks import TASKS

    return ", ".join(name for name, task in TASKS.items() if task.is_served_by(manifest))


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
        options = ExportOptions(revision=revision, precisions=precisions, reuse=True)
        before = store.references()
        bundle = export(source, name, store, options, report)
    except (ExportError, StoreError) as error:
        raise SourceError(f"model {source}: {error}") from error
    if bundle.manifest.reference not in before:
        report(f"exported {source} as {bundle.manifest.reference} to {bundle.path}")
        report(f"  offers {offered(bundle.manifest)}")
    if not precisions and (instructions := int8_advantage()):
        report(
            f"  note: int8 is faster on this processor ({instructions}); for it, serve with "
            "--precision int8 once"
        )
    return bundle.manifest.reference
