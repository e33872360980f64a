"""Fetches a bundle or a checkpoint from an address: an archive, or a folder of a store."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cloze.archives import ENDINGS, unpack
from cloze.download import (
    download_file,
    download_folder,
    sha256_of_folder,
)
from cloze.export.errors import ExportError
from cloze.model_store.plain_files import sha256_of

_BUNDLE = "manifest.json"
_CHECKPOINTS = ("config.json", "modules.json")
"""A folder with one of these files is a checkpoint. ``modules.json`` names the encoder's folder."""


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model that was fetched.

    Attributes:
        is_bundle: whether the folder is a bundle; otherwise it is a checkpoint.
        sha256: of the archive, or of the list of the folder's files (`sha256_of_folder`).
    """

    folder: Path
    is_bundle: bool
    sha256: str


def fetch_model(url: str, sha256: str | None, folder: Path) -> FetchedModel:
    """Fetch a model into an empty folder.

    Args:
        url: an address of an archive, or of a folder that fsspec can list.
        sha256: the expected hash; None accepts any.

    Raises:
        ExportError: the address cannot be read, its hash is another one, or it has no model.
        OSError: the folder cannot be written.
    """
    address = urlsplit(url)
    files = folder / "files"
    files.mkdir()
    ending = next((each for each in ENDINGS if address.path.endswith(each)), None)
    if ending is not None:
        archive = folder / "archive"
        download_file(url, archive)
        actual = sha256_of(archive)
        _check_hash(actual, sha256)
        unpack(archive, ending, files)
        archive.unlink()
    elif address.scheme in ("http", "https"):
        raise ExportError(f"an address of http must be that of an archive ({', '.join(ENDINGS)})")
    else:
        download_folder(url, files)
        actual = sha256_of_folder(files)
        _check_hash(actual, sha256)
    root, is_bundle = _find_model(files)
    return FetchedModel(root, is_bundle, actual)


def _check_hash(actual: str, expected: str | None) -> None:
    if expected is not None and actual != expected:
        raise ExportError(f"its sha256 is {actual}, but {expected} was asked for")


def _find_model(files: Path) -> tuple[Path, bool]:
    """Return the folder of the only bundle, or else of the outermost checkpoint."""
    bundles = [file.parent for file in files.rglob(_BUNDLE)]
    if len(bundles) > 1:
        raise ExportError(f"it has {len(bundles)} bundles; an address names one model")
    if bundles:
        return bundles[0], True
    checkpoints = [file.parent for name in _CHECKPOINTS for file in files.rglob(name)]
    if not checkpoints:
        raise ExportError(
            f"it has neither a bundle ({_BUNDLE}) nor a checkpoint ({' or '.join(_CHECKPOINTS)})"
        )
    return min(checkpoints, key=lambda folder: (len(folder.parts), folder)), False
