"""Tokenizes text once into memory-mapped arrays of tokens, sentence starts and document starts.

Text is streamed; only the arrays of starts are held in memory.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cloze.export.errors import Report, TrainError
from cloze.export.measure.documents import (
    Document,
    fingerprint,
    is_held_out,
    read_documents,
    split_sentences,
)
from cloze.model_store.plain_files import replacing

_SENTENCES_PER_CALL = 2048
"""Enough sentences per call of the tokenizer to keep every core busy."""

_FORMAT = 4
_SUMMARY = "corpus.json"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenized text, without special tokens.

    Attributes:
        tokens: uint16 or uint32 [T], memory-mapped.
        sentences: int64 [S + 1], the start of each sentence in ``tokens``, and T.
        documents: int64 [D + 1], the start of each document in ``sentences``, and S.
    """

    tokens: NDArray[np.unsignedinteger]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]

    @property
    def document_count(self) -> int:
        """Return D."""
        return len(self.documents) - 1


@dataclass(frozen=True, slots=True)
class PreparedCorpus:
    """The two parts of a tokenized text."""

    train: Corpus
    held_out: Corpus


def prepare_corpus(
    files: list[Path],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    held_out: float,
    only_held_out: bool = False,
    report: Report,
) -> PreparedCorpus:
    """Tokenize text into ``folder``, or open the folder if it already holds this text.

    Args:
        tokenizer: tokenizer; its special tokens are not added.
        folder: folder of the arrays; all other content of the folder is removed.
        held_out: share of titles to hold out, see `is_held_out`.
        only_held_out: whether to leave the training part empty, for evaluation.

    Raises:
        DataError: a file cannot be read, see `read_documents`.
        TrainError: the files hold no text, or the tokenized text is damaged.
    """
    context = f"{_FORMAT} {held_out} {only_held_out} {tokenizer.to_str()}"
    identity = fingerprint(files, context.encode())
    if _recorded_identity(folder) != identity:
        report("tokenizing the text")
        try:
            parts = _tokenize(_split(files, held_out), tokenizer, folder, only_held_out)
            if held_out and not parts[1].documents[-1]:
                split = _split(files, held_out, paragraphs=True)
                parts = _tokenize(split, tokenizer, folder, only_held_out)
                if parts[1].documents[-1]:
                    report("no title is held out: the text is split by paragraphs instead")
        except OSError as error:
            raise TrainError(
                f"the tokenized text cannot be written to {folder}: {error.strerror or error}"
            ) from error
        if not any(part.sentences[-1] for part in parts):
            raise TrainError("there is no text: " + ", ".join(str(file) for file in files))
        with replacing(folder / _SUMMARY) as new_file:
            new_file.write_text(json.dumps({"identity": identity}) + "\n")
        report("; ".join(map(str, parts)))
    dtype = _dtype(tokenizer)
    return PreparedCorpus(_open(folder, "train", dtype), _open(folder, "held_out", dtype))


def _recorded_identity(folder: Path) -> str | None:
    """Return the identity of the complete text in ``folder``, or None."""
    try:
        return str(json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))["identity"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _dtype(tokenizer: Tokenizer) -> Any:
    return np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32


_SplitDocument = tuple[Document, bool]
"""A document, and whether the document is held out."""


def _split(
    files: list[Path], share: float, *, paragraphs: bool = False
) -> Iterator[_SplitDocument]:
    """Yield documents, each of one part: whole by their titles, or runs of paragraphs.

    A hash of a title, or of a paragraph's text, decides the part. A document of one paragraph
    belongs to the training part if the text is split by paragraphs.
    """
    for document in read_documents(files):
        lines = [line for line in document.text.splitlines() if line.strip()]
        if not paragraphs or len(lines) == 1:
            yield document, not paragraphs and is_held_out(document.key, share)
            continue
        for held_out, run in groupby(lines, key=lambda text: is_held_out(text, share)):
            yield replace(document, text="\n".join(run)), held_out


class _Part:
    """Appends documents to the files of one part; see `Corpus`."""

    def __init__(self, file: Path, dtype: Any) -> None:
        self._file, self._dtype = file, dtype
        self.stream = file.open("wb")
        self.sentences, self.documents = [0], [0]

    def add(self, sentences: Iterable[list[int]]) -> None:
        """Append the token ids of a document, one list per sentence."""
        for ids in sentences:
            if ids:
                self.stream.write(np.asarray(ids, self._dtype).tobytes())
                self.sentences.append(self.sentences[-1] + len(ids))
        if len(self.sentences) - 1 > self.documents[-1]:
            self.documents.append(len(self.sentences) - 1)

    def save(self) -> None:
        """Write the arrays of starts."""
        self.stream.flush()
        for name, starts in (("sentences", self.sentences), ("documents", self.documents)):
            np.save(self._file.with_suffix(f".{name}.npy"), np.asarray(starts, np.int64))

    def __str__(self) -> str:
        documents, sentences = len(self.documents) - 1, len(self.sentences) - 1
        name, tokens = self._file.stem.replace("_", "-"), self.sentences[-1]
        return f"{name}: {documents:,} documents, {sentences:,} sentences, {tokens:,} tokens"


def _tokenize(
    documents: Iterator[_SplitDocument], tokenizer: Tokenizer, folder: Path, only_held_out: bool
) -> list[_Part]:
    """Empty ``folder``, and write both parts into it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = [folder / f"{name}.tokens" for name in ("train", "held_out")]
    with ExitStack() as open_files:
        parts = [_Part(file, _dtype(tokenizer)) for file in files]
        for part in parts:
            open_files.enter_context(part.stream)
        chosen = (each for each in documents if each[1] or not only_held_out)
        for batch in _batches(chosen, " " if is_byte_level(tokenizer) else ""):
            texts = [text for _, sentences in batch for text in sentences]
            encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
            for held_out, sentences in batch:
                parts[held_out].add(each.ids for each in islice(encodings, len(sentences)))
        for part in parts:
            part.save()
    return parts


def _batches(
    documents: Iterable[_SplitDocument], space: str
) -> Iterator[list[tuple[bool, list[str]]]]:
    """Group documents, as the sentences of each, so that one call of the tokenizer uses all cores.

    A space before each sentence gives its first token the form that it has in the middle of a text.
    """
    batch: list[tuple[bool, list[str]]] = []
    count = 0
    for document, held_out in documents:
        batch.append((held_out, [space + text for text in split_sentences(document.text)]))
        count += len(batch[-1][1])
        if count >= _SENTENCES_PER_CALL:
            yield batch
            batch, count = [], 0
    yield batch


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer's pieces are bytes (Radford et al. 2019, section 2.2)."""
    return "ByteLevel(" in repr(tokenizer.pre_tokenizer)


def _open(folder: Path, part: str, dtype: Any) -> Corpus:
    """Open one part; raise if a file is missing, damaged or shorter than the others."""
    damaged = TrainError(f"the tokenized text in {folder} is damaged ({part}); remove that folder")
    file = folder / f"{part}.tokens"
    try:
        is_empty = not file.stat().st_size  # an empty file cannot be mapped
        corpus = Corpus(
            np.zeros(0, dtype) if is_empty else np.memmap(file, dtype, "r"),
            *(np.load(file.with_suffix(f".{name}.npy")) for name in ("sentences", "documents")),
        )
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise damaged from error
    tokens, sentences = corpus.sentences[-1], corpus.documents[-1]
    if (tokens, sentences) != (len(corpus.tokens), len(corpus.sentences) - 1):
        raise damaged
    return corpus
