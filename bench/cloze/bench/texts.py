"""The texts of the requests: lines of a file, or random words in measured lengths."""

import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cloze.model_store import Bundle

_QUESTIONS = (47, 817, 438, 208, 143, 63, 41, 18, 15, 7, 6, 1, 1)
"""Number of questions with 7, 8, ... words, of 1,805 search questions (Natural Questions)."""

_MIN_QUESTION_WORDS = 7

_MIX = (0.75, 0.20, 0.05)
"""Shares of an embedding service: mostly queries, some sentences, few passages to index."""

MADE_TEXTS = {
    "mixed": (_MIX, "75 % as long as search questions, 20 % as sentences, 5 % as passages"),
    "questions": ((1.0, 0.0, 0.0), "as long as search questions"),
    "passages": ((0.0, 0.0, 1.0), "as long as passages"),
}
"""Kinds of random texts: the shares of questions, sentences and passages, and a description."""

_SENTENCE_WORDS, _PASSAGE_WORDS = (20, 0.5), (120, 0.5)
"""Median and sigma of log-normal word counts."""

_MIN_WORDS, _MAX_WORDS = 3, 350


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts and a description of their source."""

    texts: list[str]
    source: str


def read_lines(file: Path) -> list[str]:
    """Return the lines of a file, also of an ``.xz`` file."""
    data = file.read_bytes()
    return (lzma.decompress(data) if file.suffix == ".xz" else data).decode("utf-8").splitlines()


def read_texts(file: Path, limit: int) -> Texts:
    """Read one text per line, or JSON lines with ``text`` or ``question``; also from ``.xz``.

    Raises:
        ValueError: the file has no text, or a line is not such an object.
        OSError: the file cannot be read.
    """
    lines = read_lines(file)
    is_json = ".jsonl" in file.suffixes
    texts = [_text_of(line) if is_json else line for line in lines if line.strip()][:limit]
    if not texts:
        raise ValueError(f"{file} has no text")
    return Texts(texts, file.name)


def _text_of(line: str) -> str:
    row = json.loads(line)
    text = row.get("text", row.get("question")) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"a line has neither text nor question: {line[:80]}")
    return text


def make_texts(words: Sequence[str], count: int, kind: str = "mixed", seed: int = 0) -> Texts:
    """Make `count` texts of random words; the same seed gives the same texts."""
    shares, description = MADE_TEXTS[kind]
    rng = np.random.default_rng(seed)
    lengths = np.fromiter((_word_count(rng, shares) for _ in range(count)), int, count)
    chosen = rng.integers(len(words), size=lengths.sum())
    ends = np.cumsum(lengths)
    texts = [
        " ".join(words[i] for i in chosen[end - size : end])
        for end, size in zip(ends, lengths, strict=True)
    ]
    return Texts(texts, f"random words, {description}")


def _word_count(rng: np.random.Generator, shares: Sequence[float]) -> int:
    kind = rng.choice(["question", "sentence", "passage"], p=shares)
    if kind == "question":
        questions = np.array(_QUESTIONS) / sum(_QUESTIONS)
        return _MIN_QUESTION_WORDS + int(rng.choice(len(_QUESTIONS), p=questions))
    median, sigma = _SENTENCE_WORDS if kind == "sentence" else _PASSAGE_WORDS
    return int(np.clip(rng.lognormal(np.log(median), sigma), _MIN_WORDS, _MAX_WORDS))


def words_of(bundle: Bundle) -> list[str]:
    """Return the whole words of a bundle's vocabulary: three or more ASCII letters each."""
    tokenizer = Tokenizer.from_file(str(bundle.file(bundle.manifest.tokenizer.file)))
    return sorted(
        word
        for word in tokenizer.get_vocab()
        if len(word) > 2 and word.isascii() and word.isalpha()
    )


def mask_a_word(texts: Texts, mask: str) -> Texts:
    """Return the texts with the middle word of each replaced by `mask`."""
    masked = []
    for text in texts.texts:
        words = text.split()
        words[len(words) // 2] = mask
        masked.append(" ".join(words))
    return Texts(masked, texts.source)
