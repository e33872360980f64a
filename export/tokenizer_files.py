"""Builds a tokenizer from the files of a checkpoint.

``tokenizer.json`` may hold WordPiece, BPE or Unigram. ``vocab.txt`` is WordPiece, and
``vocab.json`` with ``merges.txt`` is byte-level BPE. For SentencePiece, see `sentencepiece_files`.
"""

import math
import unicodedata
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from cloze.export.checkpoint_files import read_settings
from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES, WordPieceKind
from cloze.export.sentencepiece_files import (
    find_sentencepiece,
    from_sentencepiece,
    mark_special,
)

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}

CONTINUATION = "##"
"""The mark of tokens that continue a word in a WordPiece vocabulary."""

BYTE_LEVEL_TOKENS = {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "mask_token": "<mask>",
}
"""The special tokens of RoBERTa, and of most families after it."""

_BYTE_LEVEL_CLASSES = {"BartTokenizer", "LongformerTokenizer"}
"""Classes of byte-level BPE tokenizers with RoBERTa's special tokens, beside the families' own.

Not GPT-2's, which puts no special tokens around a text.
"""

BYTE_LEVEL_SPACE = "Ġ"
"""The first character of a token with a space before it, in byte-level BPE."""

_END_OF_WORD = "</w>"
"""The last characters of a token with a space after it, in BPE of characters."""

_NORMALIZER_SETTINGS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}

_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
"""How a listed token is found in texts, see `tokenizers.AddedToken`."""

_WORD_SETTINGS = {"word_tokenizer_type": "basic", "subword_tokenizer_type": "wordpiece"}
"""Settings of tokenizers that may use another program, such as MeCab -> the supported value."""


def open_files(
    folder: Path, settings: dict[str, Any], given: dict[str, str]
) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer of a folder, and a note for the user.

    Raises:
        ExportError: the folder has no tokenizer, or the tokenizer is damaged or of no known kind.
    """
    if (folder / "tokenizer.json").is_file():
        tokenizer = _from_json(folder / "tokenizer.json")
        return tokenizer, _apply_settings(tokenizer, settings)
    if (folder / "vocab.txt").is_file():
        tokenizer, note = _from_vocabulary(folder / "vocab.txt", settings, given)
        _add_tokens(tokenizer, folder, settings)
        return tokenizer, note
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        tokenizer = _from_merges(folder, settings, BYTE_LEVEL_TOKENS | given)
        _add_tokens(tokenizer, folder, settings)
        return tokenizer, None
    if (model := find_sentencepiece(folder)) is not None:
        tokenizer, note = from_sentencepiece(model, settings)
        _add_tokens(tokenizer, folder, settings)
        mark_special(tokenizer, usual_names(tokenizer) | given)
        return tokenizer, note
    raise ExportError(
        f"{folder} holds no tokenizer: neither tokenizer.json, nor vocab.txt, nor vocab.json with "
        "merges.txt, nor a SentencePiece model"
    )


def usual_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the usual names of special tokens that the vocabulary has, else those of BERT."""
    tokens = tokenizer.get_vocab()
    return {
        key: other if other in tokens and SPECIAL_TOKENS[key] not in tokens else SPECIAL_TOKENS[key]
        for key, other in BYTE_LEVEL_TOKENS.items()
    }


def _apply_settings(tokenizer: Tokenizer, settings: dict[str, Any]) -> str | None:
    """Apply the settings of ``tokenizer_config.json`` to the normaliser, like transformers.

    Returns:
        A note on the changed settings, or on one without effect; None if there are none.
    """
    normalizer = tokenizer.normalizer
    named = {
        ours: settings[theirs]
        for theirs, ours in _NORMALIZER_SETTINGS.items()
        if theirs in settings
    }
    if not isinstance(normalizer, normalizers.BertNormalizer):
        if named.get("lowercase") and "Lowercase" not in repr(normalizer):
            return (
                "tokenizer: tokenizer.json's normaliser keeps the case of texts, although "
                "tokenizer_config.json says do_lower_case; transformers keeps the case too"
            )
        return None
    changed = {key: value for key, value in named.items() if getattr(normalizer, key) != value}
    for key, value in changed.items():
        setattr(normalizer, key, value)
    tokenizer.normalizer = normalizer
    shown = ", ".join(f"{key} {value}" for key, value in changed.items())
    return (
        f"tokenizer: tokenizer_config.json overrules tokenizer.json ({shown})" if changed else None
    )


def _add_tokens(tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> None:
    """Add the tokens that a checkpoint lists beside its vocabulary, with their ids and flags.

    A listed token is found in texts before they are cut, also if the vocabulary has it.
    ``added_tokens_decoder`` of ``tokenizer_config.json`` has ids and flags, ``added_tokens.json``
    has ids. ``special_tokens_map.json`` is read only without the former, as in transformers.
    """
    tokens = {one.content: one for one in tokenizer.get_added_tokens_decoder().values()}
    special = {content for content, one in tokens.items() if one.special}
    decoder = settings.get("added_tokens_decoder") or {}
    named = settings if decoder else settings | read_settings(folder / "special_tokens_map.json")
    ids: dict[str, int | None] = {}
    for key in ("additional_special_tokens", "extra_special_tokens"):
        for entry in named[key] if isinstance(named.get(key), list) else []:
            flags = {"content": entry} if isinstance(entry, str) else entry
            if (token := _added_token(flags, special=True)) and token.content not in tokens:
                ids[token.content], tokens[token.content] = None, token
    for content, number in read_settings(folder / "added_tokens.json").items():
        if isinstance(number, int):
            ids[content] = number
            tokens.setdefault(content, AddedToken(content, special=False, normalized=True))
    for number, entry in decoder.items():
        is_special = isinstance(entry, dict) and entry.get("content") in special
        if (token := _added_token(entry, special=is_special)) and str(number).isdigit():
            ids[token.content], tokens[token.content] = int(number), token
    for content, number in sorted(
        ids.items(), key=lambda item: math.inf if item[1] is None else item[1]
    ):
        tokenizer.add_tokens([tokens[content]])
        if (given := tokenizer.token_to_id(content)) != number and number is not None:
            raise ExportError(
                f"the added token {content!r} should have id {number}, "
                f"but the vocabulary leaves it {given}"
            )


def _added_token(entry: object, *, special: bool) -> AddedToken | None:
    """Return a token that a checkpoint lists with its flags; None: the entry names no token.

    Args:
        entry: the token under ``content``, and its flags.
        special: whether the token is special even if its flags do not say so.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        return None
    is_special = special or bool(entry.get("special"))
    flags = {key: bool(entry[key]) for key in _TOKEN_FLAGS if key in entry}
    flags = {"normalized": not is_special} | flags
    return AddedToken(entry["content"], special=is_special, **flags)


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer's pieces are bytes (Radford et al. 2019, section 2.2)."""
    return "ByteLevel(" in repr(tokenizer.pre_tokenizer)


def required_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token; raise if the vocabulary lacks it."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ExportError(f"the tokenizer has no {token} token, which the model needs")
    return number


def _from_json(file: Path) -> Tokenizer:
    # The library raises a bare Exception for anything wrong with the file.
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:
        raise ExportError(f"{file.name} is damaged: {error}") from error
    if not isinstance(tokenizer.model, models.WordPiece | models.BPE | models.Unigram):
        raise ExportError(
            f"{file.name} is a {type(tokenizer.model).__name__} tokenizer; "
            "only WordPiece, BPE and Unigram are supported"
        )
    return tokenizer


def _from_vocabulary(
    file: Path, settings: dict[str, Any], given: dict[str, str]
) -> tuple[Tokenizer, str | None]:
    """Build the tokenizer of a ``vocab.txt``.

    Returns:
        The tokenizer, and a note if its case was guessed.
    """
    kind = _wordpiece_kind(file.parent, settings)
    names = SPECIAL_TOKENS | dict(kind.tokens) | given
    vocabulary = _read_vocabulary(file, names["unk_token"])
    note = None
    lowercase = settings.get("do_lower_case")
    if lowercase is None:
        lowercase = not any(_is_cased(token) for token in vocabulary if token not in names.values())
        case = "uncased (no token has an upper-case or accented letter)" if lowercase else "cased"
        note = f"tokenizer: built from vocab.txt alone, taken as {case}"
    tokenizer = wordpiece(vocabulary, settings, names, lowercase=lowercase)
    if kind.separators > 1:
        cls, sep = names["cls_token"], names["sep_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {' '.join([sep] * kind.separators)} $B {sep}",
            special_tokens=[(one, required_id(tokenizer, one)) for one in (cls, sep)],
        )
    return tokenizer, note


def _wordpiece_kind(folder: Path, settings: dict[str, Any]) -> WordPieceKind:
    """Return the tokenizer of a folder's ``vocab.txt``: that of its class, else of its family.

    ``tokenizer_config.json`` names the class, else ``config.json`` does.
    """
    for key, supported in _WORD_SETTINGS.items():
        if (value := settings.get(key, supported)) != supported:
            raise ExportError(
                f"tokenizer_config.json has {key} {value!r}, by which texts are cut in another way "
                f"than with vocab.txt alone; supported is {supported!r}"
            )
    config = read_settings(folder / "config.json")
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if name is None:
        family = FAMILIES.by_model_type.get(config.get("model_type"))
        kind = family.wordpiece if family else None
        return kind or WordPieceKind("")
    for kind in (family.wordpiece for family in FAMILIES.values()):
        if kind is not None and name in (kind.name, f"{kind.name}Fast"):
            return kind
    raise ExportError(
        f"the tokenizer is a {name}, which vocab.txt alone does not describe; "
        "add its tokenizer.json"
    )


def _read_vocabulary(file: Path, unknown_token: str) -> dict[str, int]:
    """Return the ids of a vocabulary file by token."""
    try:
        tokens = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ExportError(f"{file.name} is not UTF-8 text") from error
    tokens = [token.rstrip("\r") for token in tokens]
    while tokens and not tokens[-1]:
        tokens.pop()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if unknown_token not in vocabulary:
        raise ExportError(
            f"{file.name} has no {unknown_token} token: it is not a WordPiece vocabulary, "
            "one token per line"
        )
    return vocabulary


def wordpiece(
    vocabulary: dict[str, int], settings: dict[str, Any], names: dict[str, str], *, lowercase: bool
) -> Tokenizer:
    """Build BERT's tokenizer: its normaliser, WordPiece, and the template of its sequences."""
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token=names["unk_token"], max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=True)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in names.values()
            if token in vocabulary
        ]
    )
    cls, sep = names["cls_token"], names["sep_token"]
    if cls in vocabulary and sep in vocabulary:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
        )
    return tokenizer


def _from_merges(folder: Path, settings: dict[str, Any], names: dict[str, str]) -> Tokenizer:
    """Build the byte-level BPE tokenizer of ``vocab.json`` and ``merges.txt``.

    Source: Radford et al. 2019, section 2.2, and RoBERTa's tokenizer.
    """
    _check_byte_level_class(folder, settings)
    files = [str(folder / name) for name in ("vocab.json", "merges.txt")]
    try:
        tokenizer = Tokenizer(models.BPE.from_file(*files))
    except Exception as error:  # the library raises a bare Exception
        raise ExportError(f"vocab.json or merges.txt is damaged: {error}") from error
    ends = [token for token in tokenizer.get_vocab() if token.endswith(_END_OF_WORD)]
    starts = [token for token in tokenizer.get_vocab() if token.startswith(BYTE_LEVEL_SPACE)]
    if len(ends) > len(starts):
        raise ExportError(
            f"vocab.json marks the ends of words, as in {min(ends)!r}: it is no byte-level BPE, "
            "the only kind that is read from vocab.json; add its tokenizer.json"
        )
    prefix = bool(settings.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    cls, sep, mask = (names[key] for key in ("cls_token", "sep_token", "mask_token"))
    ids = {token: required_id(tokenizer, token) for token in (cls, sep)}
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, lstrip=token == mask)
            for token in names.values()
            if tokenizer.token_to_id(token) is not None
        ]
    )
    tokenizer.post_processor = processors.RobertaProcessing(
        (sep, ids[sep]), (cls, ids[cls]), trim_offsets=True, add_prefix_space=prefix
    )
    return tokenizer


def _check_byte_level_class(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse a ``vocab.json`` of another class of tokenizers than those of byte-level BPE.

    ``tokenizer_config.json`` names the class, else ``config.json`` does, else its ``model_type``.
    """
    config = read_settings(folder / "config.json")
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if name is None:
        family = FAMILIES.by_model_type.get(config.get("model_type"))
        if family is not None and family.byte_level_class is None:
            raise ExportError(
                "nothing says which class of tokenizers vocab.json and merges.txt are for, which "
                f"no usual {family.name} has: give tokenizer_class in tokenizer_config.json"
            )
        return
    classes = {family.byte_level_class for family in FAMILIES.values()} | _BYTE_LEVEL_CLASSES
    if str(name).removesuffix("Fast") not in classes:
        raise ExportError(
            f"the tokenizer is a {name}, which vocab.json and merges.txt alone do not describe; "
            "add its tokenizer.json"
        )


def _is_cased(token: str) -> bool:
    """Return whether BERT's uncased normalisation would change a token.

    A vocabulary that was made with that normalisation has no such token.
    """
    if token.startswith(("[", "<")):
        return False
    stripped = "".join(
        c for c in unicodedata.normalize("NFD", token.lower()) if unicodedata.category(c) != "Mn"
    )
    return stripped != token
