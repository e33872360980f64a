"""Text becomes a memory-mapped corpus: tokens in their order, and where sentences and documents begin.

Knows no torch and no objective. Text is read a document at a time; only the arrays of starts are held in memory.
"""

import hashlib
import json
import lzma
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from export.train.errors import TrainError

_QUOTES = "\"'\u201c\u201d\u2018\u2019"
_SENTENCE_END = re.compile(rf"(?<=[.!?])[{_QUOTES})\]]*\s+(?=[{_QUOTES}(\[]?[A-Z0-9])")
_ABBREVIATION = re.compile(
    rf"(?:^|[\s({_QUOTES}])(?:Mr|Mrs|Ms|Dr|St|Prof|Rev|Gen|Col|Capt|Sir|Hon|Messrs|vs|etc|[A-Z])\.$"
)
_BATCH = 2048
_KEY_CHARACTERS = 500
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Document:
    """One text whose sentences follow each other.

    Attributes:
        title: empty if it has none.
        text: paragraphs, split by newlines.
        source: what its line of the file names as its ``source``; empty if nothing.
        file: the name of the file that holds it.
    """

    title: str
    text: str
    source: str = ""
    file: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """What a split by documents goes by: the title, or else how the text begins."""
        return self.title or self.text[:_KEY_CHARACTERS]


def read_documents(files: Iterable[Path]) -> Iterator[Document]:
    """Stream the documents of files: ``.jsonl`` (``text``, and ``title`` if there is one) or plain text, also ``.xz``.

    In plain text a blank line ends a document, as in BERT's own files.

    Raises:
        TrainError: a file is missing, is not UTF-8 text, or a line is not such a JSON object.
    """
    for file in files:
        try:
            if ".jsonl" in file.suffixes:
                with _open(file, "surrogateescape") as stream:  # wrong bytes are found line by line
                    documents = _from_jsonl(file, stream)
                    yield from (replace(document, file=file.name) for document in documents)
            else:
                with _open(file, "strict") as stream:
                    yield from (
                        replace(document, file=file.name) for document in _from_text(file, stream)
                    )
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


def _open(file: Path, errors: str) -> IO[str]:
    return (lzma.open if file.suffix == ".xz" else open)(
        file, "rt", encoding="utf-8", errors=errors
    )


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
    """Sentences in their order. A newline ends one; so do ``.``, ``!`` and ``?`` before a capital or a number.

    A rule, not a model: a known abbreviation or a single initial does not end a sentence.
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
    """Whether a document belongs to the held-out part: by its title alone, so that every stage splits alike.

    Titles that differ only in case, underscores or spaces are one. A larger ``share`` holds a smaller one.
    """
    key = " ".join(title.replace("_", " ").casefold().split())
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) < share * 2.0**64


class Origin(NamedTuple):
    """Where documents come from: the name of their file, and the source that their lines name."""

    file: str
    source: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenized text, without special tokens.

    Attributes:
        tokens: uint16 or uint32 [T], memory-mapped.
        sentences: int64 [S + 1], where each sentence starts in ``tokens``, and T.
        documents: int64 [D + 1], where each document starts in ``sentences``, and S.
        origin_of: int64 [D], the index of each document's origin in ``origins``.
        origins: the name of the file and the ``source`` of the documents; empty: not recorded.
    """

    tokens: NDArray[np.unsignedinteger]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]
    origin_of: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    origins: tuple[Origin, ...] = ()

    @property
    def document_count(self) -> int:
        """D."""
        return len(self.documents) - 1


@dataclass(frozen=True, slots=True)
class PreparedCorpus:
    """The two parts of a prepared text: documents to learn from, and whole documents held out."""

    train: Corpus
    held_out: Corpus


def prepare_corpus(
    files: list[Path],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    held_out: float,
    only_held_out: bool = False,
    say: Callable[[str], None],
) -> PreparedCorpus:
    """Tokenize text once into ``folder``; a folder that holds just that already is opened as it is.

    Args:
        files: the text, as `read_documents`.
        tokenizer: its special tokens are not added.
        folder: where the arrays go; anything else in it is removed.
        held_out: the share of titles that is held out, see `is_held_out`.
        only_held_out: leave the other part empty, for who only measures.
        say: is told what happens, a line each.

    Raises:
        TrainError: as `read_documents`; or there is no text.
    """
    identity = _identity(
        files, tokenizer, f"{held_out} {only_held_out}" if only_held_out else str(held_out)
    )
    summary = folder / "corpus.json"
    if _prepared(summary) != identity:
        say("tokenizing the text")
        try:
            counts = _tokenize(_split(files, held_out), tokenizer, folder, only_held_out)
            if held_out and not counts["held_out"]["documents"]:
                by_paragraph = _tokenize(
                    _split_paragraphs(files, held_out), tokenizer, folder, only_held_out
                )
                if by_paragraph["held_out"]["documents"]:
                    say(
                        "no title falls to the held-out part: the text is split by paragraphs instead"
                    )
                counts = by_paragraph
        except OSError as error:
            raise TrainError(
                f"the tokenized text cannot be written to {folder}: {error.strerror or error}"
            ) from error
        if not any(count["tokens"] for count in counts.values()):
            raise TrainError("there is no text: " + ", ".join(str(file) for file in files))
        new = summary.with_suffix(".new")
        new.write_text(json.dumps({"identity": identity, **counts}, indent=2) + "\n")
        new.replace(summary)
        say(
            "; ".join(
                f"{part.replace('_', '-')}: " + ", ".join(f"{n:,} {k}" for k, n in c.items())
                for part, c in counts.items()
            )
        )
    return PreparedCorpus(_open_part(folder, "train"), _open_part(folder, "held_out"))


_SplitDocument = tuple[Document, bool]
"""A document, and whether it is held out."""


def _split(files: list[Path], share: float) -> Iterator[_SplitDocument]:
    return ((document, is_held_out(document.key, share)) for document in read_documents(files))


def _split_paragraphs(files: list[Path], share: float) -> Iterator[_SplitDocument]:
    """Split each document into runs of paragraphs that belong to one side, each run a document of its own.

    The side of a paragraph follows from a hash of its text. A text of one paragraph stays whole, on the side to learn from.
    """
    for document in read_documents(files):
        paragraphs = [line for line in document.text.splitlines() if line.strip()]
        if len(paragraphs) == 1:
            yield document, False
            continue
        for held_out, run in groupby(
            paragraphs, key=lambda paragraph: is_held_out(paragraph, share)
        ):
            yield replace(document, text="\n".join(run)), held_out


def _tokenize(
    documents: Iterator[_SplitDocument], tokenizer: Tokenizer, folder: Path, only_held_out: bool
) -> dict[str, dict[str, int]]:
    """Write both parts into ``folder``, which is emptied first; return how much each part holds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writers = {
        part: _Writer(folder, part, tokenizer.get_vocab_size()) for part in ("train", "held_out")
    }
    try:
        chosen = (
            (document, held_out)
            for document, held_out in documents
            if held_out or not only_held_out
        )
        for batch in _batches(chosen, _BATCH):
            _write(batch, tokenizer, writers)
        for writer in writers.values():
            writer.save()
    finally:
        for writer in writers.values():
            writer.close()
    return {part: writer.counts() for part, writer in writers.items()}


def _prepared(summary: Path) -> str | None:
    """The identity of the text that a folder holds whole; None if it holds none."""
    try:
        return str(json.loads(summary.read_text(encoding="utf-8"))["identity"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fingerprint(files: Iterable[Path]) -> str:
    """One hash over the contents of files, in order.

    Raises:
        TrainError: one cannot be read.
    """
    return _add_files(hashlib.sha256(), files)


def _identity(files: list[Path], tokenizer: Tokenizer, split: str) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {split}".encode())
    digest.update(tokenizer.to_str().encode())
    digest.update("\0".join(file.name for file in files).encode())  # origins hold the names
    return _add_files(digest, files)


def _add_files(digest: "hashlib._Hash", files: Iterable[Path]) -> str:
    for file in files:
        try:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except FileNotFoundError:
            raise TrainError(f"{file}: no such file") from None
        except IsADirectoryError:
            raise TrainError(f"{file} is a directory; name the files in it") from None
        except OSError as error:
            raise TrainError(f"{file} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


_Tokenizable = tuple[_SplitDocument, list[str]]
"""A document with its side and its sentences."""


def _batches(documents: Iterator[_SplitDocument], sentences: int) -> Iterator[list[_Tokenizable]]:
    """Documents with their sentences, together so many that tokenizing them in one call uses every core."""
    batch: list[_Tokenizable] = []
    count = 0
    for document, held_out in documents:
        batch.append(((document, held_out), split_sentences(document.text)))
        count += len(batch[-1][1])
        if count >= sentences:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


class _Writer:
    """Appends documents to one part's token file."""

    def __init__(self, folder: Path, part: str, vocab_size: int) -> None:
        self._folder, self._part = folder, part
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._stream = (folder / f"{part}.tokens").open("wb")
        self._sentences, self._documents, self._tokens = [0], [0], 0
        self._origin_of: list[int] = []
        self._origins: dict[Origin, int] = {}

    def add(self, document: Document, sentences: Iterable[list[int]]) -> None:
        for ids in sentences:
            if ids:
                self._stream.write(np.asarray(ids, self._dtype).tobytes())
                self._tokens += len(ids)
                self._sentences.append(self._tokens)
        if len(self._sentences) - 1 > self._documents[-1]:
            self._documents.append(len(self._sentences) - 1)
            origin = Origin(document.file, document.source)
            self._origin_of.append(self._origins.setdefault(origin, len(self._origins)))

    def save(self) -> None:
        self._stream.close()
        np.save(self._folder / f"{self._part}.sentences.npy", np.asarray(self._sentences, np.int64))
        np.save(self._folder / f"{self._part}.documents.npy", np.asarray(self._documents, np.int64))
        np.save(self._folder / f"{self._part}.origins.npy", np.asarray(self._origin_of, np.int64))
        (self._folder / f"{self._part}.origins.json").write_text(json.dumps(list(self._origins)))
        (self._folder / f"{self._part}.dtype").write_text(np.dtype(self._dtype).name)

    def close(self) -> None:
        with suppress(OSError):  # on a full disk, which the error on its way says
            self._stream.close()

    def counts(self) -> dict[str, int]:
        return {
            "documents": len(self._documents) - 1,
            "sentences": len(self._sentences) - 1,
            "tokens": self._tokens,
        }


def _write(batch: list[_Tokenizable], tokenizer: Tokenizer, writers: dict[str, _Writer]) -> None:
    encodings = iter(
        tokenizer.encode_batch_fast(
            [s for _, sentences in batch for s in sentences], add_special_tokens=False
        )
    )
    for (document, held_out), sentences in batch:
        part = "held_out" if held_out else "train"
        writers[part].add(
            document, (encoding.ids for encoding in islice(encodings, len(sentences)))
        )


def _open_part(folder: Path, part: str) -> Corpus:
    file = folder / f"{part}.tokens"
    try:
        dtype = np.dtype((folder / f"{part}.dtype").read_text())
        corpus = Corpus(
            np.memmap(file, dtype, "r") if file.stat().st_size else np.zeros(0, dtype),
            np.load(folder / f"{part}.sentences.npy"),
            np.load(folder / f"{part}.documents.npy"),
            np.load(folder / f"{part}.origins.npy"),
            tuple(
                Origin(file, source)
                for file, source in json.loads((folder / f"{part}.origins.json").read_text())
            ),
        )
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise TrainError(
            f"the tokenized text in {folder} is damaged ({part}); remove that folder"
        ) from error
    whole = (
        corpus.sentences[-1] == len(corpus.tokens)
        and corpus.documents[-1] == len(corpus.sentences) - 1
    )
    if not whole or len(corpus.origin_of) != corpus.document_count:
        raise TrainError(f"the tokenized text in {folder} is damaged ({part}); remove that folder")
    return corpus
