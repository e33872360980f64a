"""Downloads a file or a folder from an address: by https, or from a store through fsspec."""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from cloze.export.errors import ExportError
from cloze.model_store.error_lines import first_line, printable
from cloze.model_store.plain_files import sha256_of

_TIMEOUT_S = 60
_MAX_FILES = 1000
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl")


def download_file(url: str, target: Path) -> None:
    """Download one file.

    Raises:
        ExportError: the address cannot be read.
        OSError: the target cannot be written.
    """
    with _reading(url):
        if urlsplit(url).scheme not in ("http", "https"):
            system, path = _file_system(url)
            system.get_file(path, str(target))
            return
        stream: IO[bytes] = urllib.request.urlopen(url, timeout=_TIMEOUT_S)
    with stream, target.open("wb") as file:
        while chunk := _read(stream, url):
            file.write(chunk)


def download_folder(url: str, target: Path) -> None:
    """Download all files below an address, with their paths.

    Raises:
        ExportError: the address cannot be read or has no files.
        OSError: the target cannot be written.
    """
    with _reading(url):
        system, root = _file_system(url)
        root = root.rstrip("/")
        paths = sorted(system.find(root))
    if not paths:
        raise ExportError("there is nothing at this address")
    if len(paths) > _MAX_FILES:
        raise ExportError(f"there are {len(paths)} files; the limit is {_MAX_FILES}")
    for path in paths:
        # A store may list the root with another number of slashes before it.
        relative = PurePosixPath(path.lstrip("/").removeprefix(root.lstrip("/")).lstrip("/"))
        if not relative.parts or ".." in relative.parts:
            raise ExportError(f"the path {printable(path)!a} leads out of the folder")
        file = target / relative
        file.parent.mkdir(parents=True, exist_ok=True)
        with _reading(url):
            system.get_file(path, str(file))


def sha256_of_folder(folder: Path) -> str:
    """Return the sha256 of what `sha256sum` prints of the files, sorted by their paths.

    The same hash is that of ``find . -type f -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum``.
    """
    files = sorted((file.relative_to(folder).as_posix(), file) for file in folder.rglob("*"))
    lines = [f"{sha256_of(file)}  {name}\n" for name, file in files if file.is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of fsspec for an address, and the path in the file system."""
    import fsspec

    if (protocol := urlsplit(url).scheme) in _OBJECT_STORES:
        import obstore.fsspec

        obstore.fsspec.register(protocol)
        system, path = fsspec.core.url_to_fs(url, **_obstore_options())
    else:
        system, path = fsspec.core.url_to_fs(url)
    return system, str(path)


def _obstore_options() -> dict[str, Any]:
    # By default obstore waits for three minutes before it reports that nothing answers.
    retries = {"max_retries": 3, "retry_timeout": timedelta(seconds=_TIMEOUT_S)}
    http_too = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    client = {"connect_timeout": "10s", "timeout": "3600s", "allow_http": http_too}
    return {"retry_config": retries, "client_options": client}


def _read(stream: IO[bytes], url: str) -> bytes:
    with _reading(url):
        return stream.read(1 << 20)


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Turn what a network or a store raises into one line."""
    try:
        yield
    except ExportError:
        raise
    except http.client.IncompleteRead as error:
        raise ExportError(
            f"the connection ended after {len(error.partial)} bytes of a part"
        ) from None
    except Exception as error:  # fsspec passes on the errors of every store's own library
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is the response, too
        secret = urlsplit(url).query
        reason = first_line(error).replace(url, "the address")
        reason = reason.replace(secret, "...") if secret else reason
        raise ExportError(f"cannot be read: {printable(reason)}") from None
