"""Unpacks an archive that a stranger may have made: regular files only, within limits."""

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

from cloze.export.errors import ExportError
from cloze.model_store.error_lines import first_line, printable

ENDINGS = (".tar.gz", ".tgz", ".tar.zst")

_DAMAGES: tuple[type[Exception], ...] = (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError)
_MAX_MEMBERS = 1000
_MAX_BYTES = 32 * 2**30
"""Bytes of all files together; BERT-large takes 1.4 GB in fp32."""


def unpack(archive: Path, ending: str, folder: Path) -> None:
    """Unpack an archive into an empty folder.

    Args:
        ending: one of `ENDINGS`, which determines the compression.

    Raises:
        ExportError: the archive is damaged or too large, or has a member that is neither a regular
            file nor a folder, or a path that leads out of the archive.
    """
    damages = _DAMAGES + _zstd_damages(ending)
    try:
        with archive.open("rb") as stream, _decompressed(stream, ending) as plain:
            _unpack_members(plain, folder)
    except damages as error:
        raise ExportError(f"the archive is damaged: {printable(first_line(error))}") from None


def _zstd_damages(ending: str) -> tuple[type[Exception], ...]:
    if ending != ".tar.zst":
        return ()
    import zstandard

    return (zstandard.ZstdError,)


@contextmanager
def _decompressed(stream: BinaryIO, ending: str) -> Iterator[IO[bytes]]:
    if ending == ".tar.zst":
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(stream) as plain:
            yield plain
    else:
        with gzip.open(stream) as plain:
            yield cast(IO[bytes], plain)


def _unpack_members(plain: IO[bytes], folder: Path) -> None:
    unpacked_bytes = 0
    with tarfile.open(fileobj=plain, mode="r|") as members:
        for count, member in enumerate(members, start=1):
            name = printable(member.name)
            if count > _MAX_MEMBERS:
                raise ExportError(f"the archive has more than {_MAX_MEMBERS} members")
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise ExportError(f"the archive's member {name!a} leads out of the archive")
            if member.isdir():
                continue
            if not member.isreg():
                raise ExportError(f"the archive's member {name!a} is neither a file nor a folder")
            unpacked_bytes += member.size
            if unpacked_bytes > _MAX_BYTES:
                raise ExportError(f"the archive's files have more than {_MAX_BYTES} bytes")
            _write(members, member, folder / path)


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    content = members.extractfile(member)
    assert content is not None, "a regular file has content"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
    except (FileExistsError, NotADirectoryError):
        raise ExportError(
            f"the archive's member {printable(member.name)!a} is there twice"
        ) from None
