"""Builds a tokenizer from the files of a checkpoint without ``tokenizer.json``.

``vocab.txt`` is WordPiece, and ``vocab.json`` with ``merges.txt`` is byte-level BPE.

A SentencePiece model says how pieces are cut, but not which rows of the embeddings they have, nor
which special tokens stand around texts. That is a convention of each class of tokenizers, which the
converters of transformers have. They need the extra ``sentencepiece``. No other module of the
export imports transformers.
"""

import re
import unicodedata
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import (
    AddedToken,
    BertWordPieceTokenizer,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES, Family, WordPieceKind
from cloze.export.load.source import SENTENCEPIECE_MODELS
from cloze.model_store.error_lines import first_line
from cloze.model_store.installation import install_command

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}

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

_BYTE_LEVEL_SPACE = "Ġ"
"""The first character of a token with a space before it, in byte-level BPE."""

_AROUND = ("cls_token", "sep_token")
"""The special tokens that stand around texts."""

_MERGES_FILES = ("vocab.json", "merges.txt")

_END_OF_WORD = "</w>"
"""The last characters of a token with a space after it, in BPE of characters."""

_WORD_SETTINGS = {"word_tokenizer_type": "basic", "subword_tokenizer_type": "wordpiece"}
"""Settings of tokenizers that may use another program, such as MeCab -> the supported value."""

_UNIGRAM = 1
"""The model type whose converters need no other package. No encoder known has another one."""

_OPTIONS = ("do_lower_case", "keep_accents", "split_by_punct")
"""Settings that converters read; False where a class of transformers has no default."""


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """A folder with a tokenizer, and what its settings say.

    Attributes:
        settings: ``tokenizer_config.json`` and ``special_tokens_map.json``.
        given: the names of the special tokens that the settings give, by key.
        kind: the class of the tokenizer in transformers; None: the settings name none.
        family: the model family of ``config.json``; None: it is not known.
        rows: the rows of the embeddings in ``config.json``.
    """

    folder: Path
    settings: Mapping[str, Any]
    given: dict[str, str]
    kind: object
    family: Family | None
    rows: object


def build_tokenizer(files: TokenizerFolder) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer of a folder without ``tokenizer.json``, and notes for the user.

    Raises:
        ExportError: the folder has no tokenizer, or the tokenizer is damaged or of no known kind.
    """
    folder = files.folder
    if (vocabulary := folder / "vocab.txt").is_file():
        return _from_vocabulary(vocabulary, files)
    if all((folder / name).is_file() for name in _MERGES_FILES):
        return _from_merges(files), []
    for name in SENTENCEPIECE_MODELS:
        if (folder / name).is_file():
            return _from_sentencepiece(folder / name, files)
    raise ExportError(
        f"{folder} holds no tokenizer: neither tokenizer.json, nor vocab.txt, nor vocab.json with "
        "merges.txt, nor a SentencePiece model"
    )


def no_token(token: str) -> ExportError:
    """Return the error of a vocabulary without a token."""
    return ExportError(f"the tokenizer has no {token} token, which the model needs")


def required_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token; raise if the vocabulary lacks it."""
    if (number := tokenizer.token_to_id(token)) is None:
        raise no_token(token)
    return number


def _from_vocabulary(file: Path, files: TokenizerFolder) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer of a ``vocab.txt``, and a note if its case was guessed."""
    kind, settings = wordpiece_kind(files), files.settings
    names = SPECIAL_TOKENS | dict(kind.tokens) | files.given
    vocabulary = _read_vocabulary(file, [names[key] for key in ("unk_token", *_AROUND)])
    notes = []
    lowercase = settings.get("do_lower_case")
    if lowercase is None:
        lowercase = not any(_is_cased(token) for token in vocabulary if token not in names.values())
        case = "uncased (no token has an upper-case or accented letter)" if lowercase else "cased"
        notes.append(f"tokenizer: built from vocab.txt alone, taken as {case}")
    made = BertWordPieceTokenizer(
        vocabulary,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=lowercase,
        **names,
    )
    tokenizer = Tokenizer.from_str(made.to_str())
    set_template(tokenizer, names, kind.separators)
    return tokenizer, notes


def set_template(tokenizer: Tokenizer, names: Mapping[str, str], separators: int) -> None:
    """Set the places of special tokens: with two separators, all token types are 0."""
    cls, sep = (names[key] for key in _AROUND)
    second = f"$B:1 {sep}:1" if separators == 1 else f"$B {sep}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {' '.join([sep] * separators)} {second}",
        special_tokens=[(one, required_id(tokenizer, one)) for one in (cls, sep)],
    )


def wordpiece_kind(files: TokenizerFolder) -> WordPieceKind:
    """Return the tokenizer of a folder's ``vocab.txt``: that of its class, else of its family.

    ``tokenizer_config.json`` names the class, else ``config.json`` does.
    """
    for key, supported in _WORD_SETTINGS.items():
        if (value := files.settings.get(key, supported)) != supported:
            raise ExportError(
                f"tokenizer_config.json has {key} {value!r}, by which texts are cut in another way "
                f"than with vocab.txt alone; supported is {supported!r}"
            )
    name, family = files.kind, files.family
    if name is None:
        return (family and family.wordpiece) or WordPieceKind("")
    for kind in (family.wordpiece for family in FAMILIES.values()):
        if kind is not None and name in (kind.name, f"{kind.name}Fast"):
            return kind
    raise ExportError(
        f"the tokenizer is a {name}, which vocab.txt alone does not describe; "
        "add its tokenizer.json"
    )


def _read_vocabulary(file: Path, needed: list[str]) -> dict[str, int]:
    """Return the ids of a vocabulary file by token; raise if it lacks one of the needed tokens."""
    try:
        tokens = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ExportError(f"{file.name} is not UTF-8 text") from error
    tokens = [token.rstrip("\r") for token in tokens]
    while tokens and not tokens[-1]:
        tokens.pop()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    for token in needed:
        if token not in vocabulary:
            raise ExportError(
                f"{file.name} has no {token} token: it is not a WordPiece vocabulary, one token "
                "per line"
            )
    return vocabulary


def _from_merges(files: TokenizerFolder) -> Tokenizer:
    """Return RoBERTa's byte-level BPE tokenizer (Radford et al. 2019, section 2.2)."""
    _check_byte_level_class(files)
    try:
        paths = [str(files.folder / name) for name in _MERGES_FILES]
        tokenizer = Tokenizer(models.BPE.from_file(*paths))
    except Exception as error:  # the library raises a bare Exception
        raise ExportError(f"vocab.json or merges.txt is damaged: {error}") from error
    ends = [token for token in tokenizer.get_vocab() if token.endswith(_END_OF_WORD)]
    starts = [token for token in tokenizer.get_vocab() if token.startswith(_BYTE_LEVEL_SPACE)]
    if len(ends) > len(starts):
        raise ExportError(
            f"vocab.json marks the ends of words, as in {min(ends)!r}: it is no byte-level BPE, "
            "the only kind that is read from vocab.json; add its tokenizer.json"
        )
    names = BYTE_LEVEL_TOKENS | files.given
    prefix = bool(files.settings.get("add_prefix_space"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    cls, sep = (names[key] for key in _AROUND)
    ids = {token: required_id(tokenizer, token) for token in (cls, sep)}
    _mark_special(tokenizer, names)
    tokenizer.post_processor = processors.RobertaProcessing(
        (sep, ids[sep]), (cls, ids[cls]), trim_offsets=True, add_prefix_space=prefix
    )
    return tokenizer


def _check_byte_level_class(files: TokenizerFolder) -> None:
    """Refuse a ``vocab.json`` of another class of tokenizers than those of byte-level BPE."""
    name, family = files.kind, files.family
    if name is None:
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


def _from_sentencepiece(file: Path, files: TokenizerFolder) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer of a SentencePiece model, and a note for the user."""
    kind = files.kind or (files.family and files.family.sentencepiece_class)
    if not isinstance(kind, str):
        raise ExportError(
            f"nothing says which class of tokenizers {file.name} is for: "
            "give tokenizer_class in tokenizer_config.json"
        )
    name = kind.removesuffix("Fast")
    given = {key: files.settings[key] for key in _OPTIONS if key in files.settings}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokenizer = _converted(file, name, given)
    except ImportError as error:
        command = install_command("export", "sentencepiece")
        raise ExportError(
            f"{file.name} is converted by packages that are not installed; run: {command}"
        ) from error
    loses_bytes = any("byte fallback" in str(warning.message) for warning in caught)
    note = f"tokenizer: built from {file.name} as {name}"
    return tokenizer, [f"{note}; characters outside it are unknown" if loses_bytes else note]


def _converted(file: Path, name: str, given: dict[str, Any]) -> Tokenizer:
    # An optional dependency of a second to import.
    import transformers
    from transformers.convert_slow_tokenizer import SLOW_TO_FAST_CONVERTERS, SpmConverter

    converter = SLOW_TO_FAST_CONVERTERS.get(name)
    if converter is None or not issubclass(converter, SpmConverter):
        raise ExportError(f"{file.name}: a {name} is not supported; add its tokenizer.json")
    defaults = signature(getattr(transformers, name)).parameters
    options = {key: defaults[key].default if key in defaults else False for key in _OPTIONS}
    original = SimpleNamespace(vocab_file=str(file), **options | given)
    try:
        conversion = converter(original)
        rows: list[tuple[str, float]] = conversion.vocab(conversion.proto)  # type: ignore[no-untyped-call]
        original.convert_tokens_to_ids = {piece: row for row, (piece, _) in enumerate(rows)}.get
        if not conversion.proto.pieces:
            raise ValueError("it has no pieces")
        if conversion.proto.trainer_spec.model_type != _UNIGRAM:
            raise ExportError(
                f"{file.name} is not a Unigram model, the only kind that is converted; "
                "add its tokenizer.json"
            )
        tokenizer: Tokenizer = conversion.converted()
        if not re.search(r"\bStrip\(", repr(tokenizer.normalizer)):
            # Else a space at the end of a text is a token of its own, unlike in published files.
            split = pre_tokenizers.WhitespaceSplit()
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    except (ImportError, ExportError):
        raise
    except Exception as error:  # damaged bytes make the parser raise any error
        raise ExportError(
            f"{file.name} is damaged, or not that of a {name}: {first_line(error)}"
        ) from error
    return tokenizer


def mark_pieces(tokenizer: Tokenizer, names: Mapping[str, str]) -> None:
    """Mark the special tokens among the pieces of SentencePiece.

    The converters leave them to transformers. A mask token that is no piece stands after the pieces
    and takes no space, as DeBERTa's.
    """
    _mark_special(tokenizer, names)
    mask = names["mask_token"]
    if tokenizer.token_to_id(mask) is None:
        tokenizer.add_special_tokens([AddedToken(mask, special=True, normalized=False)])


def _mark_special(tokenizer: Tokenizer, names: Mapping[str, str]) -> None:
    """Mark the special tokens of a vocabulary.

    The mask token takes the space before it, as in the ``tokenizer.json`` of published checkpoints.
    """
    pieces = tokenizer.get_vocab(with_added_tokens=False)
    tokenizer.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False, lstrip=key == "mask_token")
            for key, name in names.items()
            if name in pieces
        ]
    )
