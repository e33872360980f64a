"""The store of bundles on disk: publishes a bundle atomically and verifies a bundle on opening.

    <root>/<name>/<version>/manifest.json   and the files that the manifest lists
    <root>/.staging-<random>/               an unfinished bundle, which no reader opens

The default store of an installed package also reads the bundles that the package ships. The store
never writes to the folder of those bundles.

Publishing is one ``rename`` of a finished, synced folder. A crash before the ``rename`` leaves at
most a staging folder, which a later publish removes. Two processes that publish one name at the
same time get two versions: the second ``rename`` fails because the folder exists, and the second
process tries the next version.
"""

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cloze.model_store.error_lines import printable
from cloze.model_store.limits import MAX_MANIFEST_BYTES
from cloze.model_store.locations import DEFAULT_ROOT, SHIPPED_ROOT
from cloze.model_store.manifest import (
    NAME_PATTERN,
    BundleSpec,
    Manifest,
    StoredFile,
    parse_reference,
)
from cloze.model_store.plain_files import open_plain, read_plain, sha256_of
from cloze.model_store.system import sync, user

_MANIFEST = "manifest.json"
_STAGING_PREFIX = ".staging-"
_STALE_STAGING_S = 24 * 3600.0


class StoreError(Exception):
    """A bundle cannot be found, opened or published. The message says what to do next."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A published bundle whose files all match its manifest."""

    manifest: Manifest
    path: Path

    def file(self, name: str) -> Path:
        """Return the path of one of the manifest's files."""
        return self.path / name

    @property
    def label_encoder(self) -> "Bundle | None":
        """The encoder of labels of a bi-encoder, whose files are among this bundle's; else None."""
        manifest = self.manifest.label_manifest
        return None if manifest is None else Bundle(manifest, self.path)


class Store:
    """The bundles under one folder."""

    def __init__(self, root: Path = DEFAULT_ROOT) -> None:
        self.root = root
        self._folders = folders_to_read(root)

    def references(self) -> list[str]:
        """Return ``name@version`` of all published bundles, sorted, without opening a bundle.

        Raises:
            StoreError: this process may not read the store.
        """
        return [f"{name}@{version}" for name in self._names() for version in self._versions(name)]

    def resolve(self, reference: str) -> Path:
        """Return the folder of ``name`` (its newest version) or ``name@version``.

        Raises:
            StoreError: the bundle does not exist.
        """
        try:
            name, version = parse_reference(reference)
        except ValueError as error:
            raise StoreError(str(error)) from None
        versions = self._versions(name)
        if not versions:
            known = ", ".join(self._names()) or "none; `cloze export` makes one"
            raise StoreError(f"no bundle named {name!r} in {self.root} (available: {known})")
        if version is None:
            version = versions[-1]
        elif version not in versions:
            known = ", ".join(map(str, versions))
            raise StoreError(f"bundle {name!r} has no version {version} (available: {known})")
        paths = [folder / name / str(version) for folder in self._folders]
        return next((path for path in paths if _is_folder(path)), paths[0])

    def manifest(self, reference: str) -> Manifest:
        """Return a bundle's manifest without checking the bundle's files.

        Raises:
            StoreError: the bundle does not exist, or its manifest cannot be read.
        """
        return _read_manifest(self.resolve(reference))

    def open(self, reference: str) -> Bundle:
        """Open a bundle after checking each file's type, size and sha256 against the manifest.

        Raises:
            StoreError: the bundle does not exist, or its bytes differ from the published bytes.
        """
        path = self.resolve(reference)
        manifest = _read_manifest(path)
        _check_files(manifest, path)
        return Bundle(manifest, path)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a private folder in the store for a bundle's files; remove the folder afterwards.

        Raises:
            StoreError: the store's folder is not writable.
        """
        with _one_error(f"cannot write to the model store {self.root}"):
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_stale_staging()
            folder = self.root / (_STAGING_PREFIX + secrets.token_hex(8))
            folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, spec: BundleSpec) -> Bundle:
        """Publish a staged folder atomically as the next version of its name.

        Args:
            folder: a folder from `staging`; all of its files become part of the bundle.

        Raises:
            StoreError: writing to the disk failed.
        """
        with _one_error(f"cannot publish {spec.name!r} to {self.root}"):
            files = {file.name: _sync_and_hash(file) for file in sorted(folder.iterdir())}
            (self.root / spec.name).mkdir(exist_ok=True)
            version = max(self._versions(spec.name), default=0) + 1
            while True:
                manifest = Manifest(
                    **dict(spec),
                    version=version,
                    created=datetime.now(UTC).replace(microsecond=0),
                    files=files,
                )
                target = self.root / spec.name / str(version)
                if _rename(folder, manifest, target):
                    return Bundle(manifest, target)
                version += 1

    def adopt(self, folder: Path) -> Bundle:
        """Publish a bundle of another store atomically, under its own name and version.

        Args:
            folder: a folder within one from `staging`; only the files that its manifest lists
                become part of the bundle.

        Raises:
            StoreError: the files do not match the manifest, the store has another bundle of this
                name and version, or writing to the disk failed.
        """
        manifest = _parse_manifest(folder, folder.name)
        _check_files(manifest, folder)
        target = self.root / manifest.name / str(manifest.version)
        with _one_error(f"cannot publish {manifest.reference} to {self.root}"):
            for entry in folder.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name not in (*manifest.files, _MANIFEST):
                    entry.unlink()
                else:
                    sync(entry)
            sync(folder)
            target.parent.mkdir(exist_ok=True)
            if not _rename_folder(folder, target) and _read_manifest(target) != manifest:
                raise StoreError(
                    f"{self.root} has another {manifest.reference}; remove it first, or publish "
                    "the new one under another version"
                )
        return self.open(manifest.reference)

    def removable(self, reference: str) -> list[str]:
        """Return ``name@version`` of the bundles that `remove` removes.

        Raises:
            StoreError: the bundle does not exist, or comes with the package.
        """
        path = self.resolve(reference)
        own = self.root / path.parent.name
        versions = [
            version
            for version in _versions_in(own)
            if own / str(version) == path or "@" not in reference
        ]
        if not versions:
            raise StoreError(
                f"{reference!r} is not in {self.root}; "
                "a bundle that comes with the package is not removed"
            )
        return [f"{own.name}@{version}" for version in versions]

    def remove(self, reference: str) -> None:
        """Remove one version (``name@version``), or all versions of a bare name.

        Raises:
            StoreError: the bundle does not exist, comes with the package, or cannot be deleted.
        """
        targets = [Path(self.root, *bundle.split("@")) for bundle in self.removable(reference)]
        with _one_error(f"cannot remove {reference!r} from {self.root}"):
            for target in targets:
                trash = self.root / (_STAGING_PREFIX + secrets.token_hex(8))
                target.rename(trash)
                shutil.rmtree(trash)
            own = targets[0].parent
            if not any(own.iterdir()):
                own.rmdir()

    def _names(self) -> list[str]:
        """Return the names that have a version; ignore other folders, such as ``lost+found``."""
        names = {
            entry
            for folder in self._folders
            for entry in _entries(folder)
            if re.fullmatch(NAME_PATTERN, entry)
        }
        return sorted(name for name in names if self._versions(name))

    def _versions(self, name: str) -> list[int]:
        return sorted(
            {version for folder in self._folders for version in _versions_in(folder / name)}
        )

    def _remove_stale_staging(self) -> None:
        for folder in self.root.glob(_STAGING_PREFIX + "*"):
            with suppress(FileNotFoundError):  # another publisher has just removed the folder
                if time.time() - folder.stat().st_mtime > _STALE_STAGING_S:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _one_error(message: str) -> Iterator[None]:
    """Turn an error of the disk into one line."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{message}: {error.strerror}") from error


def _rename(folder: Path, manifest: Manifest, target: Path) -> bool:
    """Write the manifest and rename the folder; return False if the target already exists."""
    (folder / _MANIFEST).write_bytes(manifest.to_bytes())
    sync(folder / _MANIFEST)
    sync(folder)
    return _rename_folder(folder, target)


def _rename_folder(folder: Path, target: Path) -> bool:
    """Rename a folder; return False if the target already exists."""
    try:
        folder.rename(target)
    except OSError:
        if target.exists():
            return False
        raise
    sync(target.parent)
    return True


def _read_manifest(path: Path) -> Manifest:
    reference = f"{path.parent.name}@{path.name}"
    manifest = _parse_manifest(path, reference)
    if path.parts[-2:] != (manifest.name, str(manifest.version)):
        raise StoreError(
            f"the manifest of {reference} is refused: it was published as {manifest.reference}; "
            "moving a folder does not rename a bundle"
        )
    return manifest


def _parse_manifest(path: Path, title: str) -> Manifest:
    """Return the manifest in a folder; the title names the folder in errors."""
    try:
        return Manifest.from_bytes(read_plain(path / _MANIFEST, MAX_MANIFEST_BYTES))
    except OSError as error:
        raise StoreError(f"cannot read the manifest of {title}: {_reason(error)}") from error
    except ValueError as error:
        raise StoreError(f"the manifest of {title} is refused: {printable(str(error))}") from error


def _versions_in(folder: Path) -> list[int]:
    """Return the versions of one name in one folder, in order."""
    return sorted(
        int(entry)
        for entry in _entries(folder)
        if re.fullmatch(r"[1-9][0-9]{0,8}", entry) and _is_folder(folder / entry)
    )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise StoreError(f"cannot read the model store: {_reason(error)}") from error


def _entries(folder: Path) -> list[str]:
    """Return the names in a folder; none if the folder is missing or is no folder.

    Raises:
        StoreError: this process may not read the folder.
    """
    try:
        return [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"cannot read the model store: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    """Return why something cannot be read, with what an operator needs to mend permissions."""
    if isinstance(error, PermissionError):
        return f"{error.strerror} for user {user()}: {error.filename}"
    return str(error.strerror)


def _check_files(manifest: Manifest, folder: Path) -> None:
    """Check type, size and sha256 of every file that a manifest lists."""
    for name, expected in manifest.files.items():
        try:
            problem = _check_file(folder / name, expected)
        except OSError as error:
            problem = f"cannot be read ({_reason(error)})"
        if problem:
            raise StoreError(f"bundle {manifest.reference}: {name} {problem}")


def _check_file(file: Path, expected: StoredFile) -> str | None:
    """Return what is wrong with a file; None if the file is correct."""
    try:
        stream = open_plain(file)
    except FileNotFoundError:
        return f"is missing from {file.parent}"
    except ValueError as error:
        return f"is missing from {file.parent}: the entry of this name {error}"
    with stream:
        if (size := os.fstat(stream.fileno()).st_size) != expected.size:
            return f"has {size} bytes, published with {expected.size}"
        if hashlib.file_digest(stream, "sha256").hexdigest() != expected.sha256:
            return "was changed after it was published (wrong sha256)"
    return None


def _sync_and_hash(file: Path) -> StoredFile:
    sync(file)
    return StoredFile(sha256=sha256_of(file), size=file.stat().st_size)


def folders_to_read(root: Path) -> tuple[Path, ...]:
    """Return the folders from which a store at `root` reads bundles, the writable folder first.

    The default store also reads the bundles that the package ships. A store at a folder that a
    user names reads only that folder.
    """
    return (root, SHIPPED_ROOT) if root == DEFAULT_ROOT != SHIPPED_ROOT else (root,)
