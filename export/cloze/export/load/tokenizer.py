"""A checkpoint's tokenizer with its special tokens.

``tokenizer.json`` may hold WordPiece, BPE or Unigram. For other files, see `tokenizer_files`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args

from tokenizers import AddedToken, Tokenizer, models, normalizers

from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.load.source import read_settings
from cloze.export.load.tokenizer_files import (
    BYTE_LEVEL_TOKENS,
    SPECIAL_TOKENS,
    TokenizerFolder,
    build_tokenizer,
    mark_pieces,
    no_token,
    required_id,
    set_template,
    wordpiece_kind,
)
from cloze.model_store.error_lines import first_line
from cloze.model_store.sequences import Side, SpecialTokens

_AS_SAVED = "PreTrainedTokenizerFast"
"""The class of transformers that reads ``tokenizer.json`` as it is.

Others rebuild the normaliser, the marks and the special tokens of pairs from their own defaults.
"""

_READ_AS_SAVED = {_AS_SAVED, "TokenizersBackend"}
"""The names that transformers gave to that class."""

_NAMED_TOKENS = ("bos_token", "eos_token", *SPECIAL_TOKENS)
"""Settings that name a special token of a vocabulary."""

_NORMALIZER_SETTINGS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}

_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
"""How a listed token is found in texts, see `tokenizers.AddedToken`."""

_SHOWN_TOKENS = 3
"""The most tokens that a note lists."""

APPLIED_SETTINGS = {
    *_NAMED_TOKENS, *_NORMALIZER_SETTINGS, "add_prefix_space", "added_tokens_decoder",
    "additional_special_tokens", "clean_up_tokenization_spaces", "extra_special_tokens", "max_len",
    "model_input_names", "model_max_length", "split_special_tokens", "truncation_side",
    "padding_side", "use_fast", "trust_remote_code", "subfolder", "token", "cache_dir", "revision",
    "local_files_only",
}  # fmt: skip
"""Arguments of transformers' tokenizers that are applied, and those that have no effect here.

sentence-transformers replaces those that say where the files are.
"""


@dataclass(frozen=True)
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

    @cached_property
    def size(self) -> int:
        """The largest id plus one. Listing 240,000 tokens takes 0.2 s."""
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

    Raises:
        ExportError: the folder has no tokenizer, or the tokenizer is damaged, is of no known kind,
            or lacks a special token.
    """
    files = _read_folder(folder, overruling)
    settings = files.settings
    if settings.get("split_special_tokens"):
        raise ExportError(
            "tokenizer_config.json's split_special_tokens is not supported: special tokens in "
            "texts would be cut"
        )
    tokenizer, notes = _build(files)
    side = _truncation_side(tokenizer, settings)
    limit = settings.get("model_max_length", settings.get("max_len"))
    names = settings.get("model_input_names")
    described = describe_tokenizer(
        tokenizer, files.given, has_types=not isinstance(names, list) or "token_type_ids" in names
    )
    cleans_up = getattr(tokenizer.decoder, "cleanup", False)
    # transformers keeps the spaces of a BPE too.
    keeps_spaces = not cleans_up and not isinstance(tokenizer.model, models.BPE)
    if settings.get("clean_up_tokenization_spaces") and keeps_spaces:
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
    if (side := settings.get("truncation_side", usual)) not in get_args(Side):
        raise ExportError(
            f"tokenizer_config.json: truncation_side must be left or right, got {side!r:.80}"
        )
    return cast(Side, side)


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
    names = _usual_names(tokenizer) | dict(given or {})
    unknown = getattr(tokenizer.model, "unk_token", None)
    if unknown is not None and tokenizer.token_to_id(unknown) is None:
        raise no_token(unknown)
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


def _read_folder(folder: Path, overruling: Mapping[str, Any]) -> TokenizerFolder:
    """Read the settings of a folder.

    ``special_tokens_map.json`` overrules ``tokenizer_config.json``, and is not read beside the
    setting ``added_tokens_decoder``, as in transformers.
    """
    settings = read_settings(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        named, extra = read_settings(folder / "special_tokens_map.json"), "extra_special_tokens"
        if isinstance(settings.get(extra), list) and isinstance(named.get(extra), list):
            named[extra] = [*settings[extra], *named[extra]]
        settings |= named
    settings |= overruling
    config = read_settings(folder / "config.json")
    tokens = {key: _token_of(settings.get(key)) for key in SPECIAL_TOKENS}
    return TokenizerFolder(
        folder=folder,
        settings=settings,
        given={key: token.content for key, token in tokens.items() if token is not None},
        kind=settings.get("tokenizer_class") or config.get("tokenizer_class"),
        family=FAMILIES.by_model_type.get(config.get("model_type")),
        rows=config.get("vocab_size"),
    )


def _build(files: TokenizerFolder) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer of a folder, and notes for the user."""
    file = files.folder / "tokenizer.json"
    if not file.is_file():
        tokenizer, notes = build_tokenizer(files)
        notes += _add_tokens(tokenizer, files)
        if isinstance(tokenizer.model, models.Unigram):
            mark_pieces(tokenizer, _usual_names(tokenizer) | files.given)
        return tokenizer, notes
    tokenizer = _from_json(file)
    notes = _apply_settings(tokenizer, files)
    _complete_template(tokenizer, files)
    return tokenizer, [*notes, *_add_tokens(tokenizer, files, is_saved=True)]


def _usual_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the usual names of special tokens that the vocabulary has, else those of BERT."""
    tokens = tokenizer.get_vocab()
    return {
        key: other if other in tokens and SPECIAL_TOKENS[key] not in tokens else SPECIAL_TOKENS[key]
        for key, other in BYTE_LEVEL_TOKENS.items()
    }


def _apply_settings(tokenizer: Tokenizer, files: TokenizerFolder) -> list[str]:
    """Apply the settings that overrule ``tokenizer.json``, like transformers; return notes."""
    notes = []
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
        notes.append("tokenizer: tokenizer.json's dropout is for training, and switched off")
    settings = files.settings
    normalizer, pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    places = [(normalizer, ours, theirs) for theirs, ours in _NORMALIZER_SETTINGS.items()]
    places.append((pre_tokenizer, "add_prefix_space", "add_prefix_space"))
    given = [(part, key, settings[name]) for part, key, name in places if name in settings]
    differing = [one for one in given if getattr(one[0], one[1], one[2]) != one[2]]
    if differing and files.kind in _READ_AS_SAVED:
        shown = ", ".join(key for _, key, _ in differing)
        notes.append(
            f"tokenizer: tokenizer.json overrules tokenizer_config.json ({shown}), because the "
            f"class {_AS_SAVED} reads it as it is"
        )
    elif differing:
        for part, key, value in differing:
            setattr(part, key, value)
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
        shown = ", ".join(f"{key} {value}" for _, key, value in differing)
        notes.append(f"tokenizer: tokenizer_config.json overrules tokenizer.json ({shown})")
    is_unread = settings.get("do_lower_case") and not hasattr(normalizer, "lowercase")
    if is_unread and "Lowercase" not in repr(normalizer):
        notes.append(
            "tokenizer: tokenizer.json's normaliser keeps the case of texts, although "
            "tokenizer_config.json says do_lower_case; transformers keeps the case too"
        )
    return notes


def _complete_template(tokenizer: Tokenizer, files: TokenizerFolder) -> None:
    """Add the places of special tokens to a tokenizer without them, as its class does."""
    if any(tokenizer.encode("a").special_tokens_mask):
        return
    kind = files.kind
    if kind in _READ_AS_SAVED or not isinstance(tokenizer.model, models.WordPiece):
        raise ExportError(
            "tokenizer.json has no post_processor that adds special tokens"
            + (f", and the class {kind} adds none" if kind in _READ_AS_SAVED else "")
            + ": texts without a start and an end token are not supported; "
            "if the model was trained with them, add the post_processor"
        )
    names = _usual_names(tokenizer) | files.given
    set_template(tokenizer, names, wordpiece_kind(files).separators)


def _add_tokens(
    tokenizer: Tokenizer, files: TokenizerFolder, *, is_saved: bool = False
) -> list[str]:
    """Add the tokens that a checkpoint lists beside its vocabulary, with their ids and flags.

    A listed token is found in texts before they are cut, also if the vocabulary has it.
    ``added_tokens_decoder`` of ``tokenizer_config.json`` has ids and flags. ``added_tokens.json``
    has ids, and is read only without the former, as in transformers.

    Args:
        is_saved: whether the ids of tokens of the vocabulary are those of ``tokenizer.json``.
    """
    settings = files.settings
    tokens = {one.content: one for one in tokenizer.get_added_tokens_decoder().values()}
    special = set() if is_saved else {content for content, one in tokens.items() if one.special}
    named = [_token_of(settings.get(key)) for key in _NAMED_TOKENS]
    special |= {token.content for token in named if token is not None}
    ids: dict[str, int | None] = {}
    for token in (*filter(None, named), *_extra_tokens(settings)):
        known = tokens.get(token.content)
        if known is None or not known.special:
            tokens[token.content] = token if known is None else _special(known)
            ids[token.content] = None
    decoder = settings.get("added_tokens_decoder")
    listed = {} if isinstance(decoder, dict) else read_settings(files.folder / "added_tokens.json")
    for content, number in listed.items():
        if isinstance(number, int):
            ids[content] = number
            tokens.setdefault(content, AddedToken(content, special=False, normalized=True))
    for number, entry in decoder.items() if isinstance(decoder, dict) else ():
        is_special = isinstance(entry, dict) and entry.get("content") in special
        if (one := _added_token(entry, special=is_special)) and str(number).isdigit():
            ids[one.content], tokens[one.content] = int(number), one
    rows = files.rows
    left_out = []  # the embeddings have no rows for them
    for content, number in sorted(
        ids.items(), key=lambda item: math.inf if item[1] is None else item[1]
    ):
        before = tokenizer.token_to_id(content)
        if before is None and isinstance(rows, int) and tokenizer.get_vocab_size() >= rows:
            left_out.append(content)
            continue
        tokenizer.add_tokens([tokens[content]])
        if number is None or (is_saved and before is not None):
            continue
        if (given := tokenizer.token_to_id(content)) != number:
            raise ExportError(
                f"the added token {content!r} should have id {number}, "
                f"but the vocabulary leaves it {given}"
            )
    if not left_out:
        return []
    shown = ", ".join(map(repr, left_out[:_SHOWN_TOKENS]))
    return [
        f"tokenizer: {len(left_out)} listed tokens without a row in the embeddings are left out, "
        f"and read as other text: {shown}"
    ]


def _extra_tokens(settings: Mapping[str, Any]) -> list[AddedToken]:
    """Return the special tokens of a model's own: a list, by name, or under a name of their own."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    entries = list(extra.values()) if isinstance(extra, dict) else []
    entries += extra if isinstance(extra, list) else []
    entries += [
        value
        for key, value in settings.items()
        if key.endswith("_token") and key not in _NAMED_TOKENS
    ]
    return [token for entry in entries if (token := _token_of(entry)) is not None]


def _special(token: AddedToken) -> AddedToken:
    return AddedToken(token.content, special=True, **{f: getattr(token, f) for f in _TOKEN_FLAGS})


def _token_of(entry: object) -> AddedToken | None:
    """Return a special token by its name, or with its flags; None: the entry names no token."""
    return _added_token({"content": entry} if isinstance(entry, str) else entry, special=True)


def _added_token(entry: object, *, special: bool) -> AddedToken | None:
    """Return a token that a checkpoint lists with its flags; None: the entry names no token.

    ``special`` says whether the token is special even if its flags do not say so.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        return None
    is_special = special or bool(entry.get("special"))
    flags = {key: bool(entry[key]) for key in _TOKEN_FLAGS if key in entry}
    flags = {"normalized": not is_special} | flags
    return AddedToken(entry["content"], special=is_special, **flags)


def _from_json(file: Path) -> Tokenizer:
    # The library raises a bare Exception for anything wrong with the file, or even panics.
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        if isinstance(tokenizer.model, models.WordPiece | models.BPE | models.Unigram):
            tokenizer.encode("a")
            tokenizer.encode("a", "a")
            return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ExportError(f"{file.name} is damaged: {first_line(error)}") from error
    raise ExportError(
        f"{file.name} is a {type(tokenizer.model).__name__} tokenizer; "
        "only WordPiece, BPE and Unigram are supported"
    )
