"""Reads text files as documents, splits documents into sentences, and holds out whole documents.

Text is streamed one document at a time.
"""

import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cloze.export.errors import TrainError

_QUOTES = "\"'\u201c\u201d\u2018\u2019"
_SENTENCE_END = re.compile(rf"(?<=[.!?])[{_QUOTES})\]]*\s+(?=[{_QUOTES}(\[]?[A-Z0-9])")
_ABBREVIATION = re.compile(
    rf"(?:^|[\s({_QUOTES}])"
    r"(?:Mr|Mrs|Ms|Dr|St|Prof|Rev|Gen|Col|Capt|Sir|Hon|Messrs|vs|etc|[A-Z])\.$"
)
_KEY_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Document:
    """One text whose sentences follow each other.

    Attributes:
        source: the ``source`` field of the document's JSON line, or an empty string.
    """

    title: str
    text: str
    source: str = ""

    @property
    def key(self) -> str:
        """Return the text that decides the split: the title, or else the start of the text."""
        return self.title or self.text[:_KEY_CHARACTERS]


def read_documents(files: Iterable[Path]) -> Iterator[Document]:
    """Stream the documents of ``.jsonl`` and plain text files, which may be compressed as ``.xz``.

    A line of a ``.jsonl`` file is an object with ``text`` and optionally ``title`` and ``source``.
    In plain text a blank line ends a document, as in the input files of google-research/bert.

    Raises:
        TrainError: a file is missing or is not UTF-8 text, or a line is not such an object.
    """
    for file in files:
        with _read_errors(file):
            if ".jsonl" in file.suffixes:
                # `_from_jsonl` reports the line of a wrong byte.
                with _open_text(file, "surrogateescape") as stream:
                    yield from _from_jsonl(file, stream)
            else:
                with _open_text(file, "strict") as stream:
                    yield from _from_text(file, stream)


@contextmanager
def _read_errors(file: Path) -> Iterator[None]:
    """Turn an error of reading ``file`` into a `TrainError`."""
    try:
        yield
    except FileNotFoundError:
        raise TrainError(f"{file}: no such file") from None
    except IsADirectoryError:
        raise TrainError(f"{file} is a directory; name the files in it") from None
    except UnicodeDecodeError as error:
        raise TrainError(f"{file} is not UTF-8 text: {error}") from error
    except (lzma.LZMAError, EOFError) as error:
        raise TrainError(f"{file} is no whole .xz file: {error}") from error
    except OSError as error:
        raise TrainError(f"{file} cannot be read: {error.strerror or error}") from error


def _open_text(file: Path, errors: str) -> IO[str]:
    open_file = lzma.open if file.suffix == ".xz" else open
    return open_file(file, "rt", encoding="utf-8", errors=errors)


def _from_jsonl(file: Path, stream: IO[str]) -> Iterator[Document]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text, title, source = entry["text"], entry.get("title", ""), entry.get("source", "")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TrainError(
                f'{file}, line {number} is not a JSON object with a "text": {error}'
            ) from error
        if not isinstance(text, str) or not isinstance(title, str):
            raise TrainError(f'{file}, line {number}: "text" and "title" must be strings')
        if not isinstance(source, str):
            raise TrainError(f'{file}, line {number}: "source" must be a string')
        try:
            (text + title + source).encode()
        except UnicodeEncodeError as error:
            raise TrainError(f"{file}, line {number} is not UTF-8 text: {error.reason}") from None
        yield Document(title, text, source)


def _from_text(file: Path, stream: IO[str]) -> Iterator[Document]:
    lines: list[str] = []
    for line in stream:
        if "\0" in line:
            raise TrainError(f"{file} is not text: it holds a zero byte")
        if line.strip():
            lines.append(line)
        elif lines:
            yield Document("", "".join(lines))
            lines = []
    if lines:
        yield Document("", "".join(lines))


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
        TrainError: a file cannot be read.
    """
    digest = hashlib.sha256(context)
    for file in files:
        with _read_errors(file), file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
