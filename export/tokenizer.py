"""Loads a checkpoint's WordPiece tokenizer from ``tokenizer.json`` or ``vocab.txt``."""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
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

from cloze.export.errors import ExportError
from cloze.export.settings_files import read_settings

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}

_NORMALIZER_SETTINGS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_BERT_CLASSES = (
    None,
    "BertTokenizer",
    "BertTokenizerFast",
    "DistilBertTokenizer",
    "DistilBertTokenizerFast",
)


@dataclass(frozen=True, slots=True)
class CheckpointTokenizer:
    """A tokenizer and its properties for the manifest.

    Attributes:
        tokenizer: the tokenizer, without truncation and padding.
        lowercase: whether the tokenizer converts text to lower case.
        cls_id: id of the token ``[CLS]``.
        sep_id: id of the token ``[SEP]``.
        mask_id: id of the mask token; None: the vocabulary has no mask token.
        special_tokens: the special tokens of the vocabulary, by their keys in
            ``tokenizer_config.json``, such as ``mask_token``.
        max_tokens: the longest sequence in the checkpoint's settings; None: no limit is set.
        note: an assumption or a change that the user should read; None: no note.
    """

    tokenizer: Tokenizer
    lowercase: bool
    cls_id: int
    sep_id: int
    mask_id: int | None
    special_tokens: Mapping[str, str]
    max_tokens: int | None = None
    note: str | None = None

    @property
    def mask_token(self) -> str | None:
        """The mask token; None: the vocabulary has no mask token."""
        return self.special_tokens.get("mask_token")

    @property
    def size(self) -> int:
        """The largest id plus one."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def load_tokenizer(folder: Path) -> CheckpointTokenizer:
    """Load the tokenizer of a checkpoint's folder.

    ``tokenizer.json`` takes precedence over ``vocab.txt``. For ``vocab.txt``, the setting
    ``do_lower_case`` of ``tokenizer_config.json`` decides whether the tokenizer is uncased. Without
    the setting, a vocabulary without upper-case and accented letters is taken as uncased.

    Raises:
        ExportError: the folder has no tokenizer, or the tokenizer is damaged, is not WordPiece, or
            lacks a special token.
    """
    settings = read_settings(folder / "tokenizer_config.json")
    names = _special_tokens(folder, settings)
    if (folder / "tokenizer.json").is_file():
        tokenizer = _from_json(folder / "tokenizer.json")
        note = _apply_settings(tokenizer, settings)
    elif (folder / "vocab.txt").is_file():
        tokenizer, note = _from_vocabulary(folder / "vocab.txt", settings, names)
        _add_tokens(tokenizer, folder, settings)
    else:
        raise ExportError(f"{folder} holds no tokenizer: neither tokenizer.json nor vocab.txt")
    limit = settings.get("model_max_length")
    return replace(
        describe_tokenizer(tokenizer, names),
        max_tokens=int(limit) if isinstance(limit, int | float) and 2 < limit < 1e6 else None,
        note=note,
    )


def describe_tokenizer(
    tokenizer: Tokenizer, names: Mapping[str, str] = SPECIAL_TOKENS
) -> CheckpointTokenizer:
    """Return a tokenizer with its properties, and switch off its truncation and padding.

    Args:
        tokenizer: the tokenizer.
        names: names of the special tokens, by their keys in ``tokenizer_config.json``.

    Raises:
        ExportError: the vocabulary lacks a special token.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = {
        key: _required_id(tokenizer, names[key]) for key in ("cls_token", "sep_token", "unk_token")
    }
    return CheckpointTokenizer(
        tokenizer=tokenizer,
        lowercase=bool(getattr(tokenizer.normalizer, "lowercase", False)),
        cls_id=ids["cls_token"],
        sep_id=ids["sep_token"],
        mask_id=tokenizer.token_to_id(names["mask_token"]),
        special_tokens={
            key: name for key, name in names.items() if tokenizer.token_to_id(name) is not None
        },
    )


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the names of the special tokens: BERT's names unless the checkpoint sets others."""
    named = read_settings(folder / "special_tokens_map.json") | settings
    contents = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in named.items()
    }
    return SPECIAL_TOKENS | {
        key: value
        for key, value in contents.items()
        if key in SPECIAL_TOKENS and isinstance(value, str)
    }


def _apply_settings(tokenizer: Tokenizer, settings: dict[str, Any]) -> str | None:
    """Apply the settings of ``tokenizer_config.json`` to the normaliser, like transformers.

    Returns:
        A note on the changed settings; None if nothing changed.
    """
    normalizer = tokenizer.normalizer
    named = {
        ours: settings[theirs]
        for theirs, ours in _NORMALIZER_SETTINGS.items()
        if theirs in settings
    }
    if not isinstance(normalizer, normalizers.BertNormalizer):
        if named.get("lowercase") and "Lowercase" not in repr(normalizer):
            raise ExportError(
                "tokenizer_config.json says do_lower_case, "
                "but tokenizer.json's normaliser does not lower-case"
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
    """Add the tokens that a checkpoint lists outside of ``vocab.txt``, with their ids."""
    listed = {
        token: number
        for token, number in read_settings(folder / "added_tokens.json").items()
        if isinstance(number, int)
    }
    special: dict[str, bool] = {}
    for number, entry in (settings.get("added_tokens_decoder") or {}).items():
        if (
            isinstance(entry, dict)
            and isinstance(entry.get("content"), str)
            and str(number).isdigit()
        ):
            listed[entry["content"]] = int(number)
            special[entry["content"]] = bool(entry.get("special"))
    for token, number in sorted(listed.items(), key=lambda item: item[1]):
        is_special = special.get(token, False)
        if tokenizer.token_to_id(token) is None:
            tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=not is_special)])
        if (given := tokenizer.token_to_id(token)) != number:
            raise ExportError(
                f"the added token {token!r} should have id {number}, "
                f"but vocab.txt leaves it {given}"
            )


def _required_id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ExportError(f"the tokenizer has no {token} token, which BERT needs")
    return number


def _from_json(file: Path) -> Tokenizer:
    # The library raises a bare Exception for anything wrong with the file.
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:
        raise ExportError(f"{file.name} is damaged: {error}") from error
    if not isinstance(tokenizer.model, models.WordPiece):
        raise ExportError(
            f"{file.name} is a {type(tokenizer.model).__name__} tokenizer; "
            "BERT and DistilBERT use WordPiece"
        )
    return tokenizer


def _from_vocabulary(
    file: Path, settings: dict[str, Any], names: dict[str, str]
) -> tuple[Tokenizer, str | None]:
    """Build the tokenizer of a ``vocab.txt``.

    Returns:
        The tokenizer, and a note if its case was guessed.
    """
    vocabulary = _read_vocabulary(file, names["unk_token"])
    if (kind := settings.get("tokenizer_class")) not in _BERT_CLASSES:
        raise ExportError(
            f"the tokenizer is a {kind}, which vocab.txt alone does not describe; "
            "add its tokenizer.json"
        )
    note = None
    lowercase = settings.get("do_lower_case")
    if lowercase is None:
        lowercase = not any(_is_cased(token) for token in vocabulary if token not in names.values())
        case = "uncased (no token has an upper-case or accented letter)" if lowercase else "cased"
        note = f"tokenizer: built from vocab.txt alone, taken as {case}"
    return _bert_tokenizer(vocabulary, settings, names, lowercase=lowercase), note


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


def _bert_tokenizer(
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
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
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
