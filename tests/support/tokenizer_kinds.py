"""Small tokenizers of the kinds that families use, trained on the texts of the quality gate."""

import json
import math

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

from cloze.export.measure.texts import QUESTIONS, SENTENCES

TEXT = [*SENTENCES, *(text for pair in QUESTIONS for text in pair)]
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
_MASK = AddedToken("<mask>", lstrip=True, special=True, normalized=False)


def byte_level() -> Tokenizer:
    """As RoBERTa's: byte-level BPE, four special tokens in a pair, no token types."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([_MASK])
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    return tokenizer


def byte_level_with_brackets() -> Tokenizer:
    """As ModernBERT's: byte-level BPE, three special tokens in a pair, a mask that takes a space.

    As in GPT-NeoX's vocabulary, runs of spaces are tokens of their own, and special tokens stand
    after the pieces.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken(" " * count, normalized=True) for count in range(24, 1, -1)])
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    mask = AddedToken("[MASK]", lstrip=True, special=True, normalized=False)
    tokenizer.add_special_tokens([*names, mask])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(one, tokenizer.token_to_id(one)) for one in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def unigram(*, splits_first: bool = True) -> Tokenizer:
    """As XLM-R's: Unigram with marks at the start of words, four special tokens in a pair.

    Many files of older converters do not split at white space first. Letters that were not learnt
    get scores in the order of a randomly seeded hash map, 0.0001 apart: rounding makes them equal,
    or each process would learn other ids.
    """
    tokenizer = Tokenizer(models.Unigram())
    marks = pre_tokenizers.Metaspace(prepend_scheme="always")
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    tokenizer.pre_tokenizer = split if splits_first else marks
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]["vocab"][len(_SPECIAL) :]
    pieces = sorted((-math.floor(100 * score) / 100, piece) for piece, score in learnt)
    vocabulary = [(token, 0.0) for token in _SPECIAL] + [(piece, -cost) for cost, piece in pieces]
    tokenizer.model = models.Unigram(vocabulary, unk_id=_SPECIAL.index("<unk>"))
    tokenizer.add_special_tokens([_MASK])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return tokenizer


def undivided(tokenizer: Tokenizer, **settings: bool) -> Tokenizer:
    """Return a tokenizer that does not divide texts into words before its model."""
    parts = json.loads(tokenizer.to_str())
    parts["pre_tokenizer"] |= settings
    return Tokenizer.from_str(json.dumps(parts))


def gemma() -> Tokenizer:
    """As Gemma's: BPE after a normaliser that marks spaces, and no division that has an effect."""
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    letters = sorted({letter for text in TEXT for letter in text} - {" "})
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=names, initial_alphabet=letters, show_progress=False
    )
    learner.train_from_iterator(TEXT, trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [(first, second) for first, second in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens(names)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        pair="<bos> $A <eos> $B <eos>",
        special_tokens=[("<bos>", 2), ("<eos>", 1)],
    )
    return tokenizer


def mpnet_wordpiece() -> Tokenizer:
    """As MPNet's: WordPiece, four special tokens in a pair, no token types."""
    tokenizer = wordpiece((*_SPECIAL, "[UNK]"))
    tokenizer.add_special_tokens([_MASK])
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    return tokenizer


def wordpiece(
    special: tuple[str, ...] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
) -> Tokenizer:
    """As BERT's: WordPiece, three special tokens in a pair, two token types.

    The trainer reads characters in the order of a randomly seeded hash map: they are given first
    and in order, or each process would learn another vocabulary.
    """
    normalizer, words = (
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
    )
    alphabet = sorted(
        {letter for text in TEXT for letter in normalizer.normalize_str(text)} - {" "}
    )
    first = [*special, *alphabet, *(f"##{letter}" for letter in alphabet)]
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer, learner.pre_tokenizer = normalizer, words
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=first, show_progress=False)
    learner.train_from_iterator(TEXT, trainer)
    tokenizer = Tokenizer(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(special))
    if "[CLS]" in special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    return tokenizer
