"""Tokenizes text once into memory-mapped arrays of tokens, sentence starts and document starts.

Does not import torch. Text is streamed; only the arrays of starts are held in memory.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cloze.export.errors import Report, TrainError
from cloze.export.train.documents import (
    Document,
    fingerprint,
    is_held_out,
    read_documents,
    split_sentences,
)
from cloze.model_store.plain_files import replacing

_SENTENCES_PER_CALL = 2048
"""Enough sentences per call of the tokenizer to keep every core busy."""

_FORMAT = 3
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
    """The two parts of a tokenized text: training documents and held-out documents."""

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
        TrainError: a file cannot be read, see `read_documents`; or the files hold no text.
    """
    split = f"{held_out} {only_held_out}" if only_held_out else str(held_out)
    identity = _identity(files, tokenizer, split)
    if _recorded_identity(folder) != identity:
        report("tokenizing the text")
        try:
            counts = _tokenize_split(files, tokenizer, folder, held_out, only_held_out, report)
        except OSError as error:
            raise TrainError(
                f"the tokenized text cannot be written to {folder}: {error.strerror or error}"
            ) from error
        if not any(count["tokens"] for count in counts.values()):
            raise TrainError("there is no text: " + ", ".join(str(file) for file in files))
        _write_summary(folder, identity, counts)
        report("; ".join(_describe_part(part, count) for part, count in counts.items()))
    return PreparedCorpus(_open_part(folder, "train"), _open_part(folder, "held_out"))


_PartCounts = dict[str, dict[str, int]]
"""Documents, sentences and tokens per part."""

_SplitDocument = tuple[Document, bool]
"""A document, and whether the document is held out."""


def _tokenize_split(
    files: list[Path],
    tokenizer: Tokenizer,
    folder: Path,
    held_out: float,
    only_held_out: bool,
    report: Report,
) -> _PartCounts:
    """Tokenize the text split by titles, or by paragraphs if no title is held out."""
    by_title = _split_by_title(files, held_out)
    counts = _tokenize(by_title, tokenizer, folder, only_held_out)
    if held_out and not counts["held_out"]["documents"]:
        by_paragraph = _split_by_paragraph(files, held_out)
        counts = _tokenize(by_paragraph, tokenizer, folder, only_held_out)
        if counts["held_out"]["documents"]:
            report("no title falls to the held-out part: the text is split by paragraphs instead")
    return counts


def _split_by_title(files: list[Path], share: float) -> Iterator[_SplitDocument]:
    return ((document, is_held_out(document.key, share)) for document in read_documents(files))


def _split_by_paragraph(files: list[Path], share: float) -> Iterator[_SplitDocument]:
    """Split each document into runs of paragraphs of one part. Each run is a document.

    A hash of a paragraph's text decides its part. A document of one paragraph belongs to the
    training part.
    """
    for document in read_documents(files):
        paragraphs = [line for line in document.text.splitlines() if line.strip()]
        if len(paragraphs) == 1:
            yield document, False
            continue
        for held_out, run in groupby(paragraphs, key=lambda text: is_held_out(text, share)):
            yield replace(document, text="\n".join(run)), held_out


def _tokenize(
    documents: Iterator[_SplitDocument], tokenizer: Tokenizer, folder: Path, only_held_out: bool
) -> _PartCounts:
    """Empty ``folder``, write both parts into it, and return the size of each part."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writers = {
        part: _PartWriter(folder, part, tokenizer.get_vocab_size())
        for part in ("train", "held_out")
    }
    chosen = (
        (document, held_out) for document, held_out in documents if held_out or not only_held_out
    )
    try:
        for batch in _batches(chosen):
            _write_batch(batch, tokenizer, writers)
        for writer in writers.values():
            writer.save()
    finally:
        for writer in writers.values():
            writer.close()
    return {part: writer.counts() for part, writer in writers.items()}


_SentencesOfDocument = tuple[_SplitDocument, list[str]]
"""A document with its part and its sentences."""


def _batches(documents: Iterator[_SplitDocument]) -> Iterator[list[_SentencesOfDocument]]:
    """Group documents so that one call of the tokenizer uses every core."""
    batch: list[_SentencesOfDocument] = []
    count = 0
    for document, held_out in documents:
        sentences = split_sentences(document.text)
        batch.append(((document, held_out), sentences))
        count += len(sentences)
        if count >= _SENTENCES_PER_CALL:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


class _PartWriter:
    """Appends documents to the files of one part."""

    def __init__(self, folder: Path, part: str, vocab_size: int) -> None:
        self._folder, self._part = folder, part
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._stream = (folder / f"{part}.tokens").open("wb")
        self._sentences, self._documents, self._tokens = [0], [0], 0

    def add(self, sentences: Iterable[list[int]]) -> None:
        """Append the token ids of a document, one list per sentence."""
        for ids in sentences:
            if ids:
                self._stream.write(np.asarray(ids, self._dtype).tobytes())
                self._tokens += len(ids)
                self._sentences.append(self._tokens)
        if len(self._sentences) - 1 > self._documents[-1]:
            self._documents.append(len(self._sentences) - 1)

    def save(self) -> None:
        """Close the token file and write all other arrays."""
        self._stream.close()
        arrays = {"sentences": self._sentences, "documents": self._documents}
        for name, values in arrays.items():
            np.save(self._folder / f"{self._part}.{name}.npy", np.asarray(values, np.int64))
        (self._folder / f"{self._part}.dtype").write_text(np.dtype(self._dtype).name)

    def close(self) -> None:
        """Close the token file. The error of a full disk is raised by `add` or `save`."""
        with suppress(OSError):
            self._stream.close()

    def counts(self) -> dict[str, int]:
        """Return the number of documents, sentences and tokens."""
        return {
            "documents": len(self._documents) - 1,
            "sentences": len(self._sentences) - 1,
            "tokens": self._tokens,
        }


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer's pieces are bytes (Radford et al. 2019, section 2.2)."""
    return "ByteLevel(" in repr(tokenizer.pre_tokenizer)


def _write_batch(
    batch: list[_SentencesOfDocument], tokenizer: Tokenizer, writers: dict[str, _PartWriter]
) -> None:
    # The first token of a sentence has the space before it, as in the middle of a text.
    space = " " if is_byte_level(tokenizer) else ""
    texts = [space + sentence for _, sentences in batch for sentence in sentences]
    encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    for (_, held_out), sentences in batch:
        part = "held_out" if held_out else "train"
        writers[part].add(encoding.ids for encoding in islice(encodings, len(sentences)))


def _identity(files: list[Path], tokenizer: Tokenizer, split: str) -> str:
    """Return a hash of all inputs of the tokenized text."""
    context = f"{_FORMAT} {split}" + tokenizer.to_str()
    return fingerprint(files, context.encode())


def _recorded_identity(folder: Path) -> str | None:
    """Return the identity of the complete text in ``folder``, or None."""
    try:
        return str(json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))["identity"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_summary(folder: Path, identity: str, counts: _PartCounts) -> None:
    """Mark the text in ``folder`` as complete."""
    with replacing(folder / _SUMMARY) as new_file:
        new_file.write_text(json.dumps({"identity": identity, **counts}, indent=2) + "\n")


def _describe_part(part: str, counts: dict[str, int]) -> str:
    sizes = ", ".join(f"{count:,} {unit}" for unit, count in counts.items())
    return f"{part.replace('_', '-')}: {sizes}"


def _open_part(folder: Path, part: str) -> Corpus:
    """Open one part.

    Raises:
        TrainError: a file is missing, damaged or shorter than the others.
    """
    damaged = f"the tokenized text in {folder} is damaged ({part}); remove that folder"
    tokens_file = folder / f"{part}.tokens"
    try:
        dtype = np.dtype((folder / f"{part}.dtype").read_text())
        is_empty = not tokens_file.stat().st_size  # an empty file cannot be mapped
        corpus = Corpus(
            np.zeros(0, dtype) if is_empty else np.memmap(tokens_file, dtype, "r"),
            np.load(folder / f"{part}.sentences.npy"),
            np.load(folder / f"{part}.documents.npy"),
        )
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise TrainError(damaged) from error
    is_complete = (
        corpus.sentences[-1] == len(corpus.tokens)
        and corpus.documents[-1] == len(corpus.sentences) - 1
    )
    if not is_complete:
        raise TrainError(damaged)
    return corpus
