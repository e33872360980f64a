"""Learns a WordPiece vocabulary from text, and makes BERT's tokenizer around it."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from export.train.corpus import Document
from export.train.errors import TrainError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""In the order of their ids, as in BERT's own vocabularies but without its unused rows."""

CONTINUATION = "##"

_LARGEST_ALPHABET = 1000


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids of BERT's special tokens in a vocabulary."""

    cls: int
    sep: int
    mask: int


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Where a vocabulary has them.

    Raises:
        TrainError: it lacks one.
    """
    found = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS[2:]}
    cls, sep, mask = found.values()
    if cls is None or sep is None or mask is None:
        raise TrainError(
            "the tokenizer lacks "
            + ", ".join(token for token, number in found.items() if number is None)
        )
    return SpecialIds(cls, sep, mask)


def train_tokenizer(
    documents: Callable[[], Iterable[Document]],
    *,
    size: int,
    lowercase: bool,
    min_frequency: int = 2,
) -> Tokenizer:
    """Learn a vocabulary of just ``size`` tokens, the same whenever it is learnt from the same text.

    Args:
        documents: gives the text to learn from; called twice, so that it need not be held.
        size: tokens, the special ones included.
        lowercase: uncased: lower-cased and accents stripped.
        min_frequency: how often a pair of pieces must occur to become one.

    Raises:
        TrainError: there is no text, or it allows only a smaller vocabulary.
    """
    normaliser = normalizers.BertNormalizer(lowercase=lowercase)
    alphabet = _alphabet(normaliser, documents(), min(_LARGEST_ALPHABET, size // 4))
    if not alphabet:
        raise TrainError("there is no text to learn a vocabulary from")
    known = frozenset(alphabet)
    # The trainer goes through characters in the order of a randomly seeded hash map: ids and, at the edge of the alphabet, tokens
    # would differ from run to run. Named as special tokens they keep our order; what is outside the alphabet is kept from it.
    first = [*SPECIAL_TOKENS, *alphabet, *(CONTINUATION + character for character in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in first],
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    lines = (
        "".join(
            character
            for character in normaliser.normalize_str(line)
            if character in known or character.isspace()
        )
        for line in _lines(documents())
    )
    tokenizer = wordpiece(
        {}, lowercase
    )  # busy while it trains: its own normaliser must not be asked meanwhile
    tokenizer.train_from_iterator(lines, trainer)
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    if (reached := len(vocabulary)) < size:
        raise TrainError(
            f"the text allows a vocabulary of {reached:,} tokens, {size:,} were asked for; ask for less or give more text"
        )
    if reached > size:
        raise TrainError(
            f"a vocabulary of {size:,} tokens is too small: the text's characters alone need {reached:,}"
        )
    return wordpiece(vocabulary, lowercase)


def wordpiece(vocabulary: dict[str, int], lowercase: bool) -> Tokenizer:
    """BERT's tokenizer around a vocabulary."""
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=True)
    if vocabulary:
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
        )
        ids = special_ids(tokenizer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", ids.cls), ("[SEP]", ids.sep)],
        )
    return tokenizer


def _alphabet(
    normaliser: normalizers.Normalizer, documents: Iterable[Document], most: int
) -> list[str]:
    """The commonest characters, in the order of their code points; of equally common ones the lower."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(normaliser.normalize_str(document.text))
    common = sorted(
        (-count, character) for character, count in counts.items() if not character.isspace()
    )
    return sorted(character for _, character in common[:most])


def _lines(documents: Iterable[Document]) -> Iterator[str]:
    for document in documents:
        yield from document.text.splitlines()


def save_vocabulary(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``vocab.txt`` (one token a line, its id the line's number)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    written = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "vocab.txt": "".join(f"{token}\n" for token, _ in tokens),
    }
    for (
        name,
        text,
    ) in (
        written.items()
    ):  # each whole or not at all, vocab.txt last: its presence means that both are there
        new = folder / f"{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / name)
