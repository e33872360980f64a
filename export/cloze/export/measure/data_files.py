"""Reads the files of texts, pairs and questions that models are measured on."""

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloze.export.errors import DataError


def read_data(file: Path) -> bytes:
    """Return the content of a file; a ``.xz`` file is decompressed.

    Raises:
        DataError: the file is missing, or cannot be read.
    """
    try:
        data = file.read_bytes()
        return lzma.decompress(data) if file.suffix == ".xz" else data
    except FileNotFoundError:
        raise DataError(f"{file}: no such file") from None
    except (lzma.LZMAError, EOFError, OSError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file; a ``.xz`` file is decompressed.

    Raises:
        DataError: the file is missing, cannot be read, or holds something else.
    """
    data = read_data(file)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}, line {line} is not UTF-8 text: {error}") from None


def read_objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, object) of a file of JSON lines.

    Raises:
        DataError: see `read_text`; or a line is not an object, or there is no line.
    """
    row = None
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise DataError(f"{file}, line {number} is not a JSON object: {line.strip()!r:.80}")
        yield f"{file}, line {number}", row
    if row is None:
        raise DataError(f"{file} is empty")
