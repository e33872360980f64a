"""The store: bundles on disk, published atomically, opened verified. Hides the disk from everybody else.

    <root>/<name>/<version>/manifest.json and the files it lists
    <root>/.staging-<random>/               a bundle being written; nobody reads here

The default store of an installed package also reads the bundles that the package ships, and never writes there.

Publishing is one ``rename`` of a finished, synced folder. A crash before it leaves at most a staging folder, which a
later publish removes. Two processes that publish one name at once get two versions: the rename of the second fails on
the first's folder, and it goes on to the next number.
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

from model_store.locations import DEFAULT_ROOT, folders_to_read
from model_store.manifest import NAME_PATTERN, BundleSpec, Manifest, StoredFile, parse_reference

_MANIFEST = "manifest.json"
_STAGING_PREFIX = ".staging-"
_STALE_STAGING_S = 24 * 3600.0


class StoreError(Exception):
    """A bundle cannot be found, opened, or published. The message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A published bundle whose files were all checked against its manifest."""

    manifest: Manifest
    path: Path

    def file(self, name: str) -> Path:
        """The path of one of the manifest's files."""
        return self.path / name


class Store:
    """Bundles under one folder.

    Args:
        root: the bundles folder; it need not exist before the first publish.
    """

    def __init__(self, root: Path = DEFAULT_ROOT) -> None:
        self.root = root
        self._folders = folders_to_read(root)

    def references(self) -> list[str]:
        """``name@version`` of all published bundles, by name and version. None of them is looked into."""
        return [f"{name}@{version}" for name in self._names() for version in self._versions(name)]

    def resolve(self, reference: str) -> Path:
        """The folder of ``name`` (its newest version) or ``name@version``.

        Raises:
            StoreError: no such bundle.
        """
        try:
            name, version = parse_reference(reference)
        except ValueError as error:
            raise StoreError(str(error)) from None
        versions = self._versions(name)
        if not versions:
            known = ", ".join(self._names()) or "none; `cloze export` makes one"
            raise StoreError(f"no bundle named {name!r} in {self.root} (there: {known})")
        if version is None:
            version = versions[-1]
        elif version not in versions:
            raise StoreError(
                f"bundle {name!r} has no version {version} (there: {', '.join(map(str, versions))})"
            )
        paths = [folder / name / str(version) for folder in self._folders]
        return next((path for path in paths if path.is_dir()), paths[0])

    def manifest(self, reference: str) -> Manifest:
        """A bundle's manifest, its files not checked.

        Raises:
            StoreError: no such bundle, or its manifest cannot be read.
        """
        return _read_manifest(self.resolve(reference))

    def open(self, reference: str) -> Bundle:
        """Open a bundle: every file is there, is a plain file, and has the size and sha256 of the manifest.

        Raises:
            StoreError: no such bundle, or one whose bytes are not those that were published.
        """
        path = self.resolve(reference)
        manifest = _read_manifest(path)
        for name, expected in manifest.files.items():
            try:
                problem = _check_file(path / name, expected)
            except OSError as error:
                problem = f"cannot be read ({error.strerror})"
            if problem:
                raise StoreError(f"bundle {manifest.reference}: {name} {problem}")
        return Bundle(manifest, path)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A private folder inside the store to write a bundle's files into; removed unless published.

        Raises:
            StoreError: the store's folder cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_stale_staging()
            folder = self.root / (_STAGING_PREFIX + secrets.token_hex(8))
            folder.mkdir()
        except OSError as error:
            raise StoreError(
                f"cannot write to the model store {self.root}: {error.strerror}"
            ) from error
        try:
            yield folder
        except OSError as error:
            raise StoreError(
                f"cannot write to the model store {self.root}: {error.strerror}"
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, spec: BundleSpec) -> Bundle:
        """Give a staged folder the next version of its name and make it visible, all or nothing.

        Args:
            folder: one that `staging` gave; every file in it becomes part of the bundle.
            spec: the manifest, less what the store adds.

        Raises:
            StoreError: the disk refuses.
        """
        try:
            files = {file.name: _sync_and_hash(file) for file in sorted(folder.iterdir())}
            (self.root / spec.name).mkdir(exist_ok=True)
            version = self._newest(spec.name) + 1
            while True:
                manifest = Manifest(
                    **dict(spec),
                    version=version,
                    created=datetime.now(UTC).replace(microsecond=0),
                    files=files,
                )
                _write_synced(folder / _MANIFEST, manifest.to_bytes())
                _sync_folder(folder)
                target = self.root / spec.name / str(version)
                try:
                    folder.rename(target)
                except OSError:
                    if not target.exists():
                        raise
                    version += 1
                    continue
                _sync_folder(target.parent)
                return Bundle(manifest, target)
        except OSError as error:
            raise StoreError(
                f"cannot publish {spec.name!r} to {self.root}: {error.strerror}"
            ) from error

    def remove(self, reference: str) -> None:
        """Remove one version (``name@version``) or, given a bare name, all of them that were published here.

        Raises:
            StoreError: no such bundle, a bundle that comes with the package, or the disk refuses.
        """
        path = self.resolve(reference)
        own = self.root / path.parent.name
        published = [own / str(version) for version in _versions_in(own)]
        targets = [target for target in published if target == path or "@" not in reference]
        if not targets:
            raise StoreError(
                f"{reference!r} is not in {self.root}; "
                "a bundle that comes with the package is not removed"
            )
        try:
            for target in targets:
                trash = self.root / (_STAGING_PREFIX + secrets.token_hex(8))
                target.rename(trash)
                shutil.rmtree(trash)
            if not any(own.iterdir()):
                own.rmdir()
        except OSError as error:
            raise StoreError(
                f"cannot remove {reference!r} from {self.root}: {error.strerror}"
            ) from error

    def _names(self) -> list[str]:
        """Names with a version; whatever else lies on the volume (``lost+found``) is none of ours."""
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

    def _newest(self, name: str) -> int:
        return max(self._versions(name), default=0)

    def _remove_stale_staging(self) -> None:
        for folder in self.root.glob(_STAGING_PREFIX + "*"):
            with suppress(FileNotFoundError):  # another publisher has just finished with it
                if time.time() - folder.stat().st_mtime > _STALE_STAGING_S:
                    shutil.rmtree(folder, ignore_errors=True)


def _read_manifest(path: Path) -> Manifest:
    try:
        manifest = Manifest.from_bytes((path / _MANIFEST).read_bytes())
        if path.parts[-2:] != (manifest.name, str(manifest.version)):
            raise ValueError(
                f"it was published as {manifest.reference}; a bundle is not renamed by moving its folder"
            )
        return manifest
    except OSError as error:
        raise StoreError(
            f"cannot read the manifest of {path.parent.name}@{path.name}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise StoreError(
            f"the manifest of {path.parent.name}@{path.name} is refused: {error}"
        ) from error


def _versions_in(folder: Path) -> list[int]:
    """Return the versions of one name in one folder, in order."""
    return sorted(
        int(entry)
        for entry in _entries(folder)
        if re.fullmatch(r"[1-9][0-9]{0,8}", entry) and (folder / entry).is_dir()
    )


def _entries(folder: Path) -> list[str]:
    """The names in a folder; none if it is no folder, or not for us to read."""
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _check_file(file: Path, expected: StoredFile) -> str | None:
    """What is wrong with a file, if anything."""
    if file.is_symlink() or not file.is_file():
        return f"is missing from {file.parent}"
    if (size := file.stat().st_size) != expected.size:
        return f"has {size} bytes, published with {expected.size}"
    return (
        None
        if _sha256(file) == expected.sha256
        else "was changed after it was published (wrong sha256)"
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_and_hash(file: Path) -> StoredFile:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return StoredFile(sha256=_sha256(file), size=file.stat().st_size)


def _write_synced(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
