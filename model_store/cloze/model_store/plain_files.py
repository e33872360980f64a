"""Reads, hashes and replaces files.

Files of a bundle may be a stranger's: `open_plain` and `read_plain` read regular files only.
"""

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloze.model_store.system import open_to_read

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def other_kind(mode: int) -> str | None:
    """Return what a file is instead of a regular file; None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "of an unknown kind")


def open_plain(file: Path) -> io.BufferedReader:
    """Open a regular file for reading, without following a link or waiting for a pipe's writer.

    Raises:
        OSError: the file is missing or not readable.
        ValueError: the file is not a regular file.
    """
    kind = other_kind(file.lstat().st_mode)  # before `open`, which may act on a device
    if kind is None:
        descriptor = open_to_read(file)
        kind = other_kind(os.fstat(descriptor).st_mode)
        if kind is None:
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise ValueError(f"is {kind}; a bundle has regular files only")


def read_plain(file: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file is missing or not readable.
        ValueError: the file is not a regular file, or has more bytes than the limit.
    """
    with open_plain(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"has {size} bytes; the limit is {max_bytes}")
        return stream.read(max_bytes)


def sha256_of(*files: Path) -> str:
    """Return one SHA-256 of the bytes of all files, in order, in hexadecimal digits."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a new file to write, and rename it to ``file`` at the end.

    After an error or a kill, ``file`` is as it was.
    """
    new_file = file.with_name(f"{file.name}.new")
    try:
        yield new_file
        new_file.replace(file)
    finally:
        new_file.unlink(missing_ok=True)
