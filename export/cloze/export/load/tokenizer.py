"""A checkpoint's tokenizer with its special tokens and the marks of its words."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer, models, normalizers

from cloze.export.errors import ExportError
from cloze.export.load.tokenizer_files import (
    TokenizerFolder,
    required_id,
    usual_names,
)
from cloze.model_store.sequences import Side, SpecialTokens

_SENTENCEPIECE_SPACE = "▁"
"""The first character of a token with a space before it, in SentencePiece."""

_WITHOUT_SPACES = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""A character of a script without spaces: Thai, Lao, Burmese, Khmer, Japanese or Chinese."""


@dataclass(frozen=True, slots=True)
class CheckpointTokenizer:
    """A tokenizer and its properties for the manifest.

    Attributes:
        tokenizer: the tokenizer, without truncation and padding.
        lowercase: whether the tokenizer converts text to lower case.
        special_tokens: the special tokens of the vocabulary, by their keys in
            ``tokenizer_config.json``, such as ``mask_token``.
        max_tokens: the longest sequence in the checkpoint's settings; None: no limit is set.
        truncation_side: the end of a long text that is cut.
        notes: assumptions and changes that the user should read.
    """

    tokenizer: Tokenizer
    lowercase: bool
    special: SpecialTokens
    special_tokens: Mapping[str, str]
    max_tokens: int | None = None
    truncation_side: Side = "right"
    notes: tuple[str, ...] = ()

    @property
    def mask_id(self) -> int | None:
        """The id of the mask token; None: the vocabulary has no mask token."""
        return self.special.mask

    @property
    def mask_token(self) -> str | None:
        """The mask token; None: the vocabulary has no mask token."""
        return self.special_tokens.get("mask_token")

    @property
    def size(self) -> int:
        """The largest id plus one."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def readable(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without the space before it, for a person to read."""
        tokens = [self.tokenizer.id_to_token(number) or "" for number in ids]
        decoder = self.tokenizer.decoder
        return (decoder.decode(tokens) if decoder else " ".join(tokens)).strip()


def load_tokenizer(
    folder: Path, overruling: Mapping[str, Any] = MappingProxyType({})
) -> CheckpointTokenizer:
    """Load the tokenizer of a checkpoint's folder.

    ``tokenizer.json`` takes precedence over other files. For ``vocab.txt``, the setting
    ``do_lower_case`` of ``tokenizer_config.json`` decides whether the tokenizer is uncased. Without
    the setting, a vocabulary without upper-case and accented letters is taken as uncased.

    Args:
        folder: the folder.
        overruling: settings that go before those of the folder.

    Raises:
        ExportError: the folder has no tokenizer, or the tokenizer is damaged, is of no known kind,
            or lacks a special token.
    """
    files = TokenizerFolder.read(folder, overruling)
    settings = files.settings
    if settings.get("split_special_tokens"):
        raise ExportError(
            "tokenizer_config.json's split_special_tokens is not supported: special tokens in "
            "texts would be cut"
        )
    tokenizer, notes = files.build()
    side = _truncation_side(tokenizer, settings)
    limit = settings.get("model_max_length", settings.get("max_len"))
    names = settings.get("model_input_names")
    described = describe_tokenizer(
        tokenizer, files.given, has_types=not isinstance(names, list) or "token_type_ids" in names
    )
    if settings.get("clean_up_tokenization_spaces") and not _cleans_up(tokenizer):
        notes.append(
            "tokenizer: clean_up_tokenization_spaces of tokenizer_config.json is not applied: "
            "filled texts keep the spaces before punctuation"
        )
    return replace(
        described,
        max_tokens=int(limit) if isinstance(limit, int | float) and 2 < limit < 1e6 else None,
        truncation_side=side,
        notes=tuple(notes),
    )


def _truncation_side(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> Side:
    """Return the end of long texts that is cut: the settings' one, else that of the file."""
    usual = (tokenizer.truncation or {}).get("direction", "right")
    match settings.get("truncation_side", usual):
        case "left":
            return "left"
        case "right":
            return "right"
        case other:
            raise ExportError(
                f"tokenizer_config.json: truncation_side must be left or right, got {other!r:.80}"
            )


def _cleans_up(tokenizer: Tokenizer) -> bool:
    """Return whether the spaces before punctuation are removed, or transformers keeps them too."""
    return bool(getattr(tokenizer.decoder, "cleanup", False)) or isinstance(
        tokenizer.model, models.BPE
    )


def lower_cased(tokenizer: CheckpointTokenizer) -> CheckpointTokenizer:
    """Return a tokenizer that lower-cases texts first, as sentence-transformers asks.

    A tokenizer with a normaliser that lower-cases stays as it is.
    """
    original = tokenizer.tokenizer
    if tokenizer.lowercase or "Lowercase" in repr(original.normalizer):
        return tokenizer
    changed = Tokenizer.from_str(original.to_str())
    others = [] if original.normalizer is None else [original.normalizer]
    changed.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])
    return replace(tokenizer, tokenizer=changed, lowercase=True)


def describe_tokenizer(
    tokenizer: Tokenizer, given: Mapping[str, str] | None = None, *, has_types: bool = True
) -> CheckpointTokenizer:
    """Return a tokenizer with its properties, and switch off its truncation and padding.

    Args:
        given: names of special tokens; the others have their usual names.
        has_types: whether the second text of a pair may have a type of its own.

    Raises:
        ExportError: the vocabulary lacks a special token.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    names = usual_names(tokenizer) | dict(given or {})
    if (unknown := getattr(tokenizer.model, "unk_token", None)) is not None:
        required_id(tokenizer, unknown)
    return CheckpointTokenizer(
        tokenizer=tokenizer,
        lowercase=bool(getattr(tokenizer.normalizer, "lowercase", False)),
        special=_find_special(tokenizer, names, has_types=has_types),
        special_tokens={
            key: name for key, name in names.items() if tokenizer.token_to_id(name) is not None
        },
    )


def _find_special(tokenizer: Tokenizer, names: dict[str, str], *, has_types: bool) -> SpecialTokens:
    """Return the special tokens, and where the tokenizer's post-processor puts them.

    Without a post-processor, the special tokens of the settings stand where BERT has them.

    Raises:
        ExportError: the places cannot be described.
    """
    mask = tokenizer.token_to_id(names["mask_token"])
    single, pair = tokenizer.encode("a"), tokenizer.encode("a", "a")
    if not any(single.special_tokens_mask):
        cls, sep = (required_id(tokenizer, names[key]) for key in ("cls_token", "sep_token"))
        return SpecialTokens(cls, sep, mask)
    kinds = "".join("XT"[special == 0] for special in pair.special_tokens_mask)
    match = re.fullmatch(r"XT+(X{1,2})T+X", kinds)
    specials = [
        number
        for number, special in zip(pair.ids, pair.special_tokens_mask, strict=True)
        if special
    ]
    ends = re.fullmatch(r"XT+X", "".join("XT"[one == 0] for one in single.special_tokens_mask))
    if match is None or ends is None or len(set(specials[1:])) != 1:
        raise ExportError(
            "the tokenizer's post-processor puts its special tokens where no supported family has "
            f"them: {single.tokens} for a text, {pair.tokens} for a pair"
        )
    second_type = pair.type_ids[match.end(1)] if has_types else 0
    special = SpecialTokens(specials[0], specials[-1], mask, len(match[1]), second_type)
    first_tokens = match.start(1) - 1
    types = special.pair_types(first_tokens, len(pair) - first_tokens - special.pair_tokens)
    if has_types and ([*types] != pair.type_ids or any(single.type_ids) or second_type > 1):
        raise ExportError(
            "the tokenizer's post-processor gives token types that no supported family has: "
            f"{single.type_ids} for a text, {pair.type_ids} for a pair"
        )
    return special
