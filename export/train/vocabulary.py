"""Learns a WordPiece vocabulary from text, and saves and opens tokenizers."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, normalizers, trainers

from cloze.export.errors import TrainError
from cloze.export.load.tokenizer import CheckpointTokenizer, load_tokenizer
from cloze.export.load.tokenizer_files import CONTINUATION, wordpiece
from cloze.export.load.tokenizer_files import SPECIAL_TOKENS as NAMES
from cloze.export.train.documents import Document
from cloze.model_store.plain_files import replacing

SPECIAL_TOKENS = tuple(NAMES.values())
"""Special tokens of a new vocabulary in the order of their ids, as in BERT but without BERT's
unused rows.
"""

_MAX_ALPHABET = 1000


def train_tokenizer(
    documents: Callable[[], Iterable[Document]],
    *,
    size: int,
    lowercase: bool,
    min_frequency: int = 2,
) -> Tokenizer:
    """Learn a vocabulary of exactly ``size`` tokens. The same text gives the same vocabulary.

    Args:
        documents: returns the text to learn from; called twice, so that the text is streamed.
        size: number of tokens, special tokens included.

    Raises:
        TrainError: there is no text, the text allows only a smaller vocabulary, or the alphabet
            needs a larger vocabulary.
    """
    normaliser = normalizers.BertNormalizer(lowercase=lowercase)
    alphabet = _alphabet(normaliser, documents(), min(_MAX_ALPHABET, size // 4))
    if not alphabet:
        raise TrainError("there is no text to learn a vocabulary from")
    # The trainer reads characters in the order of a randomly seeded hash map, so ids, and tokens at
    # the edge of the alphabet, would differ from run to run. Special tokens keep our order, and
    # `_lines` removes all characters outside the alphabet.
    first = [*SPECIAL_TOKENS, *alphabet, *(CONTINUATION + character for character in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in first],
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    # The normaliser of a tokenizer in training cannot be used, so `_lines` has its own.
    tokenizer = wordpiece({}, {}, NAMES, lowercase=lowercase)
    tokenizer.train_from_iterator(_lines(documents(), normaliser, frozenset(alphabet)), trainer)
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    if (learnt_size := len(vocabulary)) < size:
        raise TrainError(
            f"the text allows a vocabulary of {learnt_size:,} tokens, {size:,} were asked for; "
            "ask for less or give more text"
        )
    if learnt_size > size:
        raise TrainError(
            f"a vocabulary of {size:,} tokens is too small: "
            f"the text's characters alone need {learnt_size:,}"
        )
    return wordpiece(vocabulary, {}, NAMES, lowercase=lowercase)


def _alphabet(
    normaliser: normalizers.Normalizer, documents: Iterable[Document], limit: int
) -> list[str]:
    """Return the ``limit`` most frequent characters, ordered by code point.

    Of equally frequent characters, the lower code point is preferred.
    """
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(normaliser.normalize_str(document.text))
    by_frequency = sorted(
        (-count, character) for character, count in counts.items() if not character.isspace()
    )
    return sorted(character for _, character in by_frequency[:limit])


def _lines(
    documents: Iterable[Document], normaliser: normalizers.Normalizer, alphabet: frozenset[str]
) -> Iterator[str]:
    """Yield the normalised lines of the documents without characters outside the alphabet."""
    for document in documents:
        for line in document.text.splitlines():
            yield "".join(
                character
                for character in normaliser.normalize_str(line)
                if character in alphabet or character.isspace()
            )


def save_vocabulary(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, and ``vocab.txt`` of WordPiece with one token per line, by id.

    Each file is written atomically. ``vocab.txt`` is last, so its presence means that both files
    are complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"tokenizer.json": tokenizer.to_str(pretty=True)}
    if isinstance(tokenizer.model, models.WordPiece):
        vocabulary = tokenizer.get_vocab()
        tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
        contents["vocab.txt"] = "".join(f"{token}\n" for token in tokens)
    for name, text in contents.items():
        with replacing(folder / name) as new_file:
            new_file.write_text(text, encoding="utf-8")


def open_tokenizer(folder: Path) -> CheckpointTokenizer:
    """Open the tokenizer of a folder, without truncation and padding.

    Raises:
        ExportError: the tokenizer is missing or damaged, or lacks a special token.
        TrainError: the vocabulary has no mask token.
    """
    opened = load_tokenizer(folder)
    mask_id(opened)
    return opened


def mask_id(tokenizer: CheckpointTokenizer) -> int:
    """Return the id of the mask token.

    Raises:
        TrainError: the vocabulary has no mask token.
    """
    if tokenizer.special.mask is None:
        raise TrainError("the tokenizer has no mask token, which training needs")
    return tokenizer.special.mask
