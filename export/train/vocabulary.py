"""Learns a WordPiece vocabulary from text, and makes BERT's tokenizer around it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from export.train.corpus import Document
from export.train.errors import TrainError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""In the order of their ids, as in BERT's own vocabularies but without its unused rows."""

CONTINUATION = "##"


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
        raise TrainError("the tokenizer lacks " + ", ".join(token for token, number in found.items() if number is None))
    return SpecialIds(cls, sep, mask)


def train_tokenizer(documents: Iterable[Document], *, size: int, lowercase: bool, min_frequency: int = 2) -> Tokenizer:
    """Learn a vocabulary of just ``size`` tokens.

    Args:
        documents: the text to learn from, read once.
        size: tokens, the special ones included.
        lowercase: uncased: lower-cased and accents stripped.
        min_frequency: how often a pair of pieces must occur to become one.

    Raises:
        TrainError: there is no text, or it allows only a smaller vocabulary.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        limit_alphabet=min(1000, max(size // 4, 1)),
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(documents), trainer)
    if (reached := tokenizer.get_vocab_size()) == len(SPECIAL_TOKENS):
        raise TrainError("there is no text to learn a vocabulary from")
    if reached < size:
        raise TrainError(
            f"the text allows a vocabulary of {reached:,} tokens, {size:,} were asked for; ask for less or give more text"
        )
    if reached > size:
        raise TrainError(f"a vocabulary of {size:,} tokens is too small: the text's characters alone need {reached:,}")
    ids = special_ids(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", ids.cls), ("[SEP]", ids.sep)]
    )
    return tokenizer


def _lines(documents: Iterable[Document]) -> Iterator[str]:
    for document in documents:
        yield from document.text.splitlines()


def save_vocabulary(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``vocab.txt`` (one token a line, its id the line's number)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in tokens), encoding="utf-8")
