"""Builds a tokenizer from the files of a checkpoint.

``tokenizer.json`` may hold WordPiece, BPE or Unigram. ``vocab.txt`` is WordPiece, and
``vocab.json`` with ``merges.txt`` is byte-level BPE. For SentencePiece, see `sentencepiece_files`.
"""

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
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
from cloze.export.families import FAMILIES, Family, WordPieceKind
from cloze.export.load.sentencepiece_files import (
    find_sentencepiece,
    from_sentencepiece,
    mark_special,
)
from cloze.export.load.source import read_settings
from cloze.model_store.error_lines import first_line

AS_SAVED = "PreTrainedTokenizerFast"
"""The class of transformers that reads ``tokenizer.json`` as it is.

Others rebuild the normaliser, the marks and the special tokens of pairs from their own defaults.
"""

_READ_AS_SAVED = {AS_SAVED, "TokenizersBackend"}
"""The names that transformers gave to that class."""

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

_MERGES_FILES = ("vocab.json", "merges.txt")

_END_OF_WORD = "</w>"
"""The last characters of a token with a space after it, in BPE of characters."""

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

_WORD_SETTINGS = {"word_tokenizer_type": "basic", "subword_tokenizer_type": "wordpiece"}
"""Settings of tokenizers that may use another program, such as MeCab -> the supported value."""


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """A folder with a tokenizer, and what its settings say.

    Attributes:
        settings: ``tokenizer_config.json`` and ``special_tokens_map.json``.
        config: ``config.json``.
    """

    folder: Path
    settings: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, overruling: Mapping[str, Any]) -> "TokenizerFolder":
        """Read the settings of a folder.

        ``special_tokens_map.json`` overrules ``tokenizer_config.json``, and is not read beside the
        setting ``added_tokens_decoder``, as in transformers.

        Args:
            folder: the folder.
            overruling: settings that go before those of the folder.
        """
        settings = read_settings(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in settings:
            named, extra = read_settings(folder / "special_tokens_map.json"), "extra_special_tokens"
            if isinstance(settings.get(extra), list) and isinstance(named.get(extra), list):
                named[extra] = [*settings[extra], *named[extra]]
            settings |= named
        return cls(folder, {**settings, **overruling}, read_settings(folder / "config.json"))

    @property
    def given(self) -> dict[str, str]:
        """The names of the special tokens that the settings give, by key."""
        named = {key: _token_of(self.settings.get(key)) for key in SPECIAL_TOKENS}
        return {key: token.content for key, token in named.items() if token is not None}

    @property
    def kind(self) -> object:
        """The class of the tokenizer in transformers; None: the settings name none."""
        return self.settings.get("tokenizer_class") or self.config.get("tokenizer_class")

    @property
    def family(self) -> Family | None:
        """The model family of ``config.json``."""
        return FAMILIES.by_model_type.get(self.config.get("model_type"))

    def build(self) -> tuple[Tokenizer, list[str]]:
        """Return the tokenizer, and notes for the user.

        Raises:
            ExportError: the folder has no tokenizer, or the tokenizer is damaged or of no known
                kind.
        """
        file, vocabulary = self.folder / "tokenizer.json", self.folder / "vocab.txt"
        if file.is_file():
            tokenizer = _from_json(file)
            notes = _apply_settings(tokenizer, self)
            _complete_template(tokenizer, self)
        elif vocabulary.is_file():
            tokenizer, notes = _from_vocabulary(vocabulary, self)
        elif all((self.folder / name).is_file() for name in _MERGES_FILES):
            tokenizer, notes = _from_merges(self), []
        elif (model := find_sentencepiece(self.folder)) is not None:
            tokenizer, note = from_sentencepiece(model, self.kind, self.family, self.settings)
            notes = [note, *_add_tokens(tokenizer, self)]
            mark_special(tokenizer, usual_names(tokenizer) | self.given)
            return tokenizer, notes
        else:
            raise ExportError(
                f"{self.folder} holds no tokenizer: neither tokenizer.json, nor vocab.txt, nor "
                "vocab.json with merges.txt, nor a SentencePiece model"
            )
        return tokenizer, [*notes, *_add_tokens(tokenizer, self, is_saved=file.is_file())]


def usual_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the usual names of special tokens that the vocabulary has, else those of BERT."""
    tokens = tokenizer.get_vocab()
    return {
        key: other if other in tokens and SPECIAL_TOKENS[key] not in tokens else SPECIAL_TOKENS[key]
        for key, other in BYTE_LEVEL_TOKENS.items()
    }


def _apply_settings(tokenizer: Tokenizer, files: TokenizerFolder) -> list[str]:
    """Apply the settings that overrule ``tokenizer.json``, like transformers.

    Returns:
        Notes on the changed settings, and on those without effect.
    """
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
            f"class {AS_SAVED} reads it as it is"
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
    """Add the places of special tokens to a tokenizer without them, as its class does.

    Raises:
        ExportError: the class adds no special tokens, or it is not known where.
    """
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
    names = usual_names(tokenizer) | files.given
    _set_template(tokenizer, names, _wordpiece_kind(files).separators)


def _add_tokens(
    tokenizer: Tokenizer, files: TokenizerFolder, *, is_saved: bool = False
) -> list[str]:
    """Add the tokens that a checkpoint lists beside its vocabulary, with their ids and flags.

    A listed token is found in texts before they are cut, also if the vocabulary has it.
    ``added_tokens_decoder`` of ``tokenizer_config.json`` has ids and flags. ``added_tokens.json``
    has ids, and is read only without the former, as in transformers.

    Args:
        tokenizer: the tokenizer.
        files: its folder.
        is_saved: whether the ids of tokens of the vocabulary are those of ``tokenizer.json``.

    Returns:
        A note on tokens that are left out, because the embeddings have no rows for them.
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
    rows = files.config.get("vocab_size")
    left_out = []
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


def _from_vocabulary(file: Path, files: TokenizerFolder) -> tuple[Tokenizer, list[str]]:
    """Build the tokenizer of a ``vocab.txt``.

    Returns:
        The tokenizer, and a note if its case was guessed.
    """
    kind, settings = _wordpiece_kind(files), files.settings
    names = SPECIAL_TOKENS | dict(kind.tokens) | files.given
    vocabulary = _read_vocabulary(file, names["unk_token"])
    notes = []
    lowercase = settings.get("do_lower_case")
    if lowercase is None:
        lowercase = not any(_is_cased(token) for token in vocabulary if token not in names.values())
        case = "uncased (no token has an upper-case or accented letter)" if lowercase else "cased"
        notes.append(f"tokenizer: built from vocab.txt alone, taken as {case}")
    tokenizer = wordpiece(vocabulary, settings, names, lowercase=lowercase)
    if kind.separators > 1:
        _set_template(tokenizer, names, kind.separators)
    return tokenizer, notes


def _set_template(tokenizer: Tokenizer, names: dict[str, str], separators: int) -> None:
    """Set the places of special tokens: with two separators, all token types are 0."""
    cls, sep = names["cls_token"], names["sep_token"]
    second = f"$B:1 {sep}:1" if separators == 1 else f"$B {sep}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {' '.join([sep] * separators)} {second}",
        special_tokens=[(one, required_id(tokenizer, one)) for one in (cls, sep)],
    )


def _wordpiece_kind(files: TokenizerFolder) -> WordPieceKind:
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
    vocabulary: dict[str, int],
    settings: Mapping[str, Any],
    names: dict[str, str],
    *,
    lowercase: bool,
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
    if names["cls_token"] in vocabulary and names["sep_token"] in vocabulary:
        _set_template(tokenizer, names, separators=1)
    return tokenizer


def _from_merges(files: TokenizerFolder) -> Tokenizer:
    """Build the byte-level BPE tokenizer of ``vocab.json`` and ``merges.txt``.

    Source: Radford et al. 2019, section 2.2, and RoBERTa's tokenizer.
    """
    _check_byte_level_class(files)
    try:
        paths = [str(files.folder / name) for name in _MERGES_FILES]
        tokenizer = Tokenizer(models.BPE.from_file(*paths))
    except Exception as error:  # the library raises a bare Exception
        raise ExportError(f"vocab.json or merges.txt is damaged: {error}") from error
    ends = [token for token in tokenizer.get_vocab() if token.endswith(_END_OF_WORD)]
    starts = [token for token in tokenizer.get_vocab() if token.startswith(BYTE_LEVEL_SPACE)]
    if len(ends) > len(starts):
        raise ExportError(
            f"vocab.json marks the ends of words, as in {min(ends)!r}: it is no byte-level BPE, "
            "the only kind that is read from vocab.json; add its tokenizer.json"
        )
    prefix, names = bool(files.settings.get("add_prefix_space")), BYTE_LEVEL_TOKENS | files.given
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


def _check_byte_level_class(files: TokenizerFolder) -> None:
    """Refuse a ``vocab.json`` of another class of tokenizers than those of byte-level BPE.

    ``tokenizer_config.json`` names the class, else ``config.json`` does, else its ``model_type``.
    """
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
