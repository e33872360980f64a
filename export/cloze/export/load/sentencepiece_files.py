"""Builds a tokenizer from a SentencePiece model with the converters of transformers.

A model says how pieces are cut, but not which rows of the embeddings they have, nor which special
tokens stand around texts. That is a convention of each class of tokenizers, which the converters
have. They need the extra ``sentencepiece``. No other module of the export imports transformers.
"""

import re
import warnings
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from cloze.export.errors import ExportError
from cloze.export.families import Family
from cloze.export.load.source import SENTENCEPIECE_MODELS
from cloze.model_store.error_lines import first_line
from cloze.model_store.installation import install_command

_UNIGRAM = 1
"""The model type whose converters need no other package. No encoder known has another one."""

_OPTIONS = ("do_lower_case", "keep_accents", "split_by_punct")
"""Settings that converters read; False where a class of transformers has no default."""


def find_sentencepiece(folder: Path) -> Path | None:
    """Return the SentencePiece model of a folder; None if the folder has none."""
    files = (folder / name for name in SENTENCEPIECE_MODELS)
    return next((file for file in files if file.is_file()), None)


def from_sentencepiece(
    file: Path, kind: object, family: Family | None, settings: Mapping[str, Any]
) -> tuple[Tokenizer, str]:
    """Convert a SentencePiece model.

    Args:
        file: the model.
        kind: the class of the tokenizer in transformers; None: that of the family.
        family: the model family; None: it is not known.
        settings: ``tokenizer_config.json``.

    Returns:
        The tokenizer, and a note for the user.

    Raises:
        ExportError: the model is damaged, the extra is not installed, or nothing says which class
            of tokenizers the model belongs to.
    """
    kind = kind or (family and family.sentencepiece_class)
    if not isinstance(kind, str):
        raise ExportError(
            f"nothing says which class of tokenizers {file.name} is for: "
            "give tokenizer_class in tokenizer_config.json"
        )
    name = kind.removesuffix("Fast")
    given = {key: settings[key] for key in _OPTIONS if key in settings}
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
    return tokenizer, f"{note}; characters outside it are unknown" if loses_bytes else note


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


def mark_special(tokenizer: Tokenizer, names: dict[str, str]) -> None:
    """Mark the special tokens among the pieces, which the converters leave to transformers.

    A mask token among the pieces takes the space before it, as in the ``tokenizer.json`` of
    published checkpoints. Another one stands after the pieces and takes no space, as DeBERTa's.
    """
    pieces = tokenizer.get_vocab(with_added_tokens=False)
    tokenizer.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False, lstrip=key == "mask_token")
            for key, name in names.items()
            if name in pieces
        ]
    )
    mask = names["mask_token"]
    if tokenizer.token_to_id(mask) is None:
        tokenizer.add_special_tokens([AddedToken(mask, special=True, normalized=False)])
