"""Reads the files of texts, pairs and questions that models learn from and are measured on."""

import lzma
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError

from cloze.export.errors import DataError

_HALF = re.compile("[\ud800-\udfff]")
"""A byte that is not UTF-8, as `surrogateescape` decodes it."""


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn an error of reading ``file`` into a `DataError`."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{file}: no such file") from None
    except IsADirectoryError:
        raise DataError(f"{file} is a directory; name the files in it") from None
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"{file} is no whole .xz file: {error}") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their ends; a ``.xz`` file is decompressed.

    Raises:
        DataError: the file is missing, cannot be read, or holds something else.
    """
    open_file = lzma.open if file.suffix == ".xz" else open
    with (
        reading(file),
        open_file(file, "rt", encoding="utf-8", errors="surrogateescape", newline="") as stream,
    ):
        for number, line in enumerate(stream, 1):
            if _HALF.search(line):
                raise DataError(f"{file}, line {number} is not UTF-8 text: {line[:40]!r}")
            if "\0" in line:
                raise DataError(f"{file}, line {number} is not text: it holds a zero byte")
            yield line


STRICT = ConfigDict(strict=True)
"""Settings of the dataclasses that `read_entries` makes."""

Entry = TypeVar("Entry")
Text = Annotated[str, StringConstraints(pattern=r"\S")]


def read_entries(file: Path, kind: type[Entry]) -> Iterator[tuple[str, Entry]]:
    """Yield (file and line, entry) of a file of JSON lines.

    Args:
        kind: a dataclass of pydantic.

    Raises:
        DataError: see `read_lines`; or a line is no such entry.
    """
    adapter = TypeAdapter(kind)
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            continue
        try:
            entry = adapter.validate_json(line)
        except ValidationError as error:
            raise DataError(f"{file}, line {number}: {describe_error(error)}") from None
        yield f"{file}, line {number}", entry


def describe_error(error: ValidationError) -> str:
    """Describe the first error of a validation, or an unknown key if there is one.

    A misspelt key causes two errors, and the unknown key explains the missing key.
    """
    details = error.errors()
    detail = next((each for each in details if each["type"] == "extra_forbidden"), details[0])
    location = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"unknown key {location}"
    # The messages of our own validators are complete.
    message = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], str | int | float | list):
        message = f"{message}, got {repr(detail['input'])[:80]}"
    # The other input is a table: a key is missing, or the keys do not fit together.
    return f"{location}: {message}" if location else message
