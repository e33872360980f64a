"""Reads the files that models learn from and are measured on: lines, JSON objects, documents.

Documents are split into sentences, and whole documents are held out. Text is streamed.
"""

import csv
import hashlib
import lzma
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from cloze.export.errors import DataError
from cloze.model_store import csv_rows

_HALF = re.compile("[\ud800-\udfff]")
"""A byte that is not UTF-8, as `surrogateescape` decodes it."""


_LONGEST_FIELD = 2**26
"""Most characters of a field of a table."""


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
    """Yield (file and line, entry) of a file of JSON lines; ``kind`` is a dataclass of pydantic.

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


def read_table(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (file and line, fields by column) of a CSV or TSV file with a header.

    Raises:
        DataError: see `read_lines`; or the columns have no names, or a row has other fields.
    """
    delimiter = "\t" if ".tsv" in file.suffixes else ","
    rows = csv_rows.records(read_lines(file), most_characters=_LONGEST_FIELD, delimiter=delimiter)
    try:
        header = [name.removeprefix("\ufeff") for name in csv_rows.header_of(rows)]
        for line, record in rows:
            row, problem = csv_rows.named(header, record)
            if problem is not None:
                raise DataError(f"{file}, line {line}: {problem}")
            yield f"{file}, line {line}", row
    except (csv.Error, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} {error}") from None


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


# ---- documents -----------------------------------------------------------------------------------

_QUOTES = "\"'\u201c\u201d\u2018\u2019"
_SENTENCE_END = re.compile(rf"(?<=[.!?])[{_QUOTES})\]]*\s+(?=[{_QUOTES}(\[]?[A-Z0-9])")
_ABBREVIATION = re.compile(
    rf"(?:^|[\s({_QUOTES}])"
    r"(?:Mr|Mrs|Ms|Dr|St|Prof|Rev|Gen|Col|Capt|Sir|Hon|Messrs|vs|etc|[A-Z])\.$"
)
_KEY_CHARACTERS = 500


@dataclass(frozen=True, slots=True, config=STRICT)
class Document:
    """One text whose sentences follow each other."""

    text: str
    title: str = ""

    @property
    def key(self) -> str:
        """Return the text that decides the split: the title, or else the start of the text."""
        return self.title or self.text[:_KEY_CHARACTERS]


def read_documents(files: Iterable[Path]) -> Iterator[Document]:
    """Stream the documents of ``.jsonl`` and plain text files, which may be compressed as ``.xz``.

    A line of a ``.jsonl`` file is an object with ``text`` and optionally ``title``. In plain text a
    blank line ends a document, as in the input files of google-research/bert.

    Raises:
        DataError: a file is missing or is not UTF-8 text, or a line is not such an object.
    """
    for file in files:
        if ".jsonl" in file.suffixes:
            yield from (document for _, document in read_entries(file, Document))
        else:
            yield from _from_text(file)


def _from_text(file: Path) -> Iterator[Document]:
    lines: list[str] = []
    for line in read_lines(file):
        if line.strip():
            lines.append(line)
        elif lines:
            yield Document("".join(lines))
            lines = []
    if lines:
        yield Document("".join(lines))


def split_sentences(text: str) -> list[str]:
    """Split text into sentences, in order.

    A sentence ends at a newline, or at ``.``, ``!`` or ``?`` before a capital letter or a digit. A
    known abbreviation or a single initial does not end a sentence.
    """
    sentences = []
    for paragraph in text.splitlines():
        start = 0
        for match in _SENTENCE_END.finditer(paragraph):
            piece = paragraph[start : match.end()].strip()
            if piece and not _ABBREVIATION.search(piece):
                sentences.append(piece)
                start = match.end()
        if piece := paragraph[start:].strip():
            sentences.append(piece)
    return sentences


def is_held_out(title: str, share: float) -> bool:
    """Return whether the document with this title belongs to the held-out part.

    The result depends on the title alone, so every training stage splits alike. Titles that differ
    only in case, underscores or spaces are equal. A larger ``share`` holds out a superset.
    """
    key = " ".join(title.replace("_", " ").casefold().split())
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) < share * 2.0**64


def fingerprint(files: Iterable[Path], context: bytes = b"") -> str:
    """Return one SHA-256 over ``context`` and the contents of the files, in order.

    Raises:
        DataError: a file cannot be read.
    """
    digest = hashlib.sha256(context)
    for file in files:
        with reading(file), file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
