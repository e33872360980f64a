"""Reads text files as documents, splits documents into sentences, and holds out whole documents.

Text is streamed one document at a time.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic.dataclasses import dataclass

from cloze.export.measure.data_files import STRICT, read_entries, read_lines, reading

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
        yield from (_from_jsonl if ".jsonl" in file.suffixes else _from_text)(file)


def _from_jsonl(file: Path) -> Iterator[Document]:
    for _, document in read_entries(file, Document):
        yield document


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
