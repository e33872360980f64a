"""Learns a WordPiece vocabulary from text, and writes its tokenizer as transformers reads it."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, PreTrainedTokenizerBase

from cloze.export.errors import TrainError
from cloze.export.measure.documents import Document

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens of a new vocabulary in the order of their ids, as in BERT but without BERT's
unused rows.
"""

_CONTINUATION = "##"
_MAX_ALPHABET = 1000


def train_tokenizer(
    documents: Callable[[], Iterable[Document]], *, size: int, lowercase: bool
) -> PreTrainedTokenizerBase:
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
    first = [*SPECIAL_TOKENS, *alphabet, *(_CONTINUATION + character for character in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in first],
        continuing_subword_prefix=_CONTINUATION,
        show_progress=False,
    )
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL_TOKENS[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(_lines(documents(), normaliser, alphabet), trainer)
    vocabulary = tokenizer.get_vocab()
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
    learnt: PreTrainedTokenizerBase = BertTokenizer(vocab=vocabulary, do_lower_case=lowercase)
    return learnt


def _alphabet(
    normaliser: normalizers.Normalizer, documents: Iterable[Document], limit: int
) -> list[str]:
    """Return the ``limit`` most frequent characters, ordered by code point."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(normaliser.normalize_str(document.text))
    common = (character for character, _ in counts.most_common() if not character.isspace())
    return sorted(islice(common, limit))


def _lines(
    documents: Iterable[Document], normaliser: normalizers.Normalizer, alphabet: Iterable[str]
) -> Iterator[str]:
    """Yield the normalised lines of the documents without characters outside the alphabet."""
    others = re.compile(rf"[^{re.escape(''.join(alphabet))}\s]")
    for document in documents:
        for line in document.text.splitlines():
            yield others.sub("", normaliser.normalize_str(line))


def save_vocabulary(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the files of a tokenizer. A file ``tokenizer.json`` means that all are complete.

    Raises:
        TrainError: the disk is full, or the folder cannot be written.
    """
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        tokenizer.save_pretrained(new)
    except Exception as error:  # tokenizers raises no class of its own
        raise TrainError(f"the vocabulary cannot be written to {folder}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)  # what a user keeps in it stays
    for file in sorted(new.iterdir(), key=lambda file: file.name == "tokenizer.json"):
        file.replace(folder / file.name)
    new.rmdir()
