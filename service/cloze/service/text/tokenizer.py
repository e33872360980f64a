"""Converts texts to token ids and back, and cuts sequences to the model's limit.

The only module of the service that imports the tokenizers library.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Final, Literal
from weakref import WeakValueDictionary

import numpy as np
from tokenizers import Encoding as BackendEncoding
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram, WordPiece

from cloze.model_store import Bundle
from cloze.model_store.batch import Encoding
from cloze.model_store.error_lines import first_line
from cloze.model_store.heads import HeadRequest
from cloze.model_store.limits import MAX_TOKENIZER_BYTES
from cloze.model_store.manifest import TokenizerSpec
from cloze.model_store.plain_files import read_plain
from cloze.model_store.sequences import without_space
from cloze.service.errors import StartupError
from cloze.service.text.pieces import SPACE_OR_PUNCTUATION, Boundary, Piece, find_boundary, groups
from cloze.service.threads import check_awaited

_LONGEST_FORM = "\ufdfa"
"""The character whose compatibility form is longest: 18 characters. Source: Unicode, UAX 15."""

_SHORT = 4096
"""Most characters that the calling thread tokenizes, in about 1 ms, and ids that it decodes.

Threads of the library do the rest. Under an overload they may wait a second for a core.
"""

_PLAIN = re.compile(r"[0-9A-Za-z .,;:!?'\"()-]*")
"""Text that BERT's normalizer changes only in case; see `_Vocabulary.words`."""

_WORD = re.compile("[0-9A-Za-z]+|[^ ]")
"""A word of plain text: BERT's tokenizer divides it into tokens without its neighbours."""

_NOT_PLAIN = re.compile(r"[][<>|{}_]")
"""Characters that no normalizer changes, and no plain text has."""

_SPACE = re.compile(r"[^\S\x1c-\x1f]+")
"""White space. Python counts four control characters, which normalisers remove, as such too."""

_MOST_WORDS, _LONGEST_WORD = 8192, 32
"""Most words whose tokens are remembered, about 2 MB, and most characters of such a word."""


@dataclass(frozen=True, eq=False)
class _Vocabulary:
    """A tokenizer of the library, with what its file says."""

    backend: Backend
    boundary: Boundary | None  # where long texts may be divided
    expands: bool  # whether the normaliser replaces characters by their compatibility forms
    unknown_id: int | None
    size: int  # number of tokens, those included that no text becomes
    # The ids of recent words; None unless the ids of plain text are those of its words, one after
    # another. The library takes five times as long to find them.
    words: dict[str, list[int]] | None
    added: re.Pattern[str]  # matches the tokens that the library looks for before it divides a text
    # The ids of recent words that were tokenized alone.
    alone: dict[str, list[int]] = field(default_factory=dict)

    @cached_property
    def literal(self) -> Backend:
        """A tokenizer that reads the names of special tokens as other text."""
        literal = Backend.from_str(self.backend.to_str())
        literal.encode_special_tokens = True
        return literal


_IN_USE: Final[WeakValueDictionary[bytes, _Vocabulary]] = WeakValueDictionary()
"""The vocabularies of all tokenizers, by the sha256 of their files, which many bundles share.

A vocabulary of 30,522 tokens takes 9 MB and 40 ms.
"""

NO_WORD: Final = -1
"""The word of a special token."""

Words = Literal["tokenizer", "transformers"]
"""Where words begin: as for the tokenizer, or as for transformers' TokenClassificationPipeline."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The tokens of a text with their positions in the text, in 16 bytes per token.

    Attributes:
        ids: without special tokens.
        starts, ends: first character of each token, and the character after its last one.
        words: number of the word of each token, or `NO_WORD`; neighbours of one word have the same.
    """

    ids: "array[int]" = field(default_factory=lambda: array("i"))
    starts: "array[int]" = field(default_factory=lambda: array("i"))
    ends: "array[int]" = field(default_factory=lambda: array("i"))
    words: "array[int]" = field(default_factory=lambda: array("i"))

    def add(
        self,
        encoding: BackendEncoding,
        start: int,
        marked: str | None = None,
        begins: Callable[[int, int, int], bool] | None = None,
    ) -> None:
        """Add the tokens of the next piece of a text, which starts at a character.

        The text is marked if its tokens include the space before them, which is left out. Without
        a function that says of (id, start, end) whether a token begins a word, the tokenizer's
        words count.
        """
        next_word = self.words[-1] + 1 if self.words else 0
        offsets = encoding.offsets
        if start:
            offsets = [(first + start, end + start) for first, end in offsets]
        places = offsets if marked is None else without_space(marked, offsets)
        if begins:
            firsts = (begins(token, *at) for token, at in zip(encoding.ids, offsets, strict=True))
            words = [*accumulate(firsts, initial=max(next_word - 1, 0))][1:]
        else:
            words = [NO_WORD if w is None else w + next_word for w in encoding.word_ids]
            words = words if marked is None else _divided(marked, places, words)
        self.ids.extend(encoding.ids)
        self.starts.extend([first for first, _ in places])
        self.ends.extend([end for _, end in places])
        self.words.extend(words)

    def part(self, first: int, end: int) -> "Spans":
        """Return some tokens of the text."""
        if first == 0 and end >= len(self.ids):
            return self  # a copy would double the memory
        part = slice(first, end)
        return Spans(self.ids[part], self.starts[part], self.ends[part], self.words[part])

    def offsets(self) -> list[tuple[int, int]]:
        """Return the (start, end) of tokens, in characters."""
        return list(zip(self.starts, self.ends, strict=True))

    def characters(self, bounds: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the (start, end) characters of parts of the text by their (first, end) tokens."""
        return [(self.starts[first], self.ends[end - 1]) for first, end in bounds]


def _divided(text: str, offsets: Sequence[tuple[int, int]], words: Sequence[int]) -> list[int]:
    """Return the words of tokens, where each word ends at white space.

    Gemma's tokenizer, for example, has one word for a whole text.
    """
    divided: list[int] = []
    new, before, read = (words[0] if words else 0) - 1, None, None
    for word, (start, end) in zip(words, offsets, strict=True):
        is_blank = start == end or _SPACE.fullmatch(text, start, end)
        if word != before:
            new, before, read = new + 1, word, None
        elif read is not None and (is_blank or _SPACE.search(text, read, start)):
            new += 1
        read = read if is_blank else end
        divided.append(NO_WORD if word == NO_WORD else new)
    return divided


class Tokenizer:
    """The tokenizer of a bundle. Several threads may call its methods at once.

    Attributes:
        special: the special tokens, and their places around texts.
        mask_token: for example ``[MASK]``.
        unknown_id: id of the token that replaces text outside the vocabulary; None: the vocabulary
            has a token for every byte.
        truncation_side: the end of a long text that is cut unless the request says otherwise.

    Raises:
        StartupError: the bundle's tokenizer file cannot be read, or is not what the manifest says.
    """

    def __init__(self, bundle: Bundle) -> None:
        spec = bundle.manifest.tokenizer
        try:
            data = read_plain(bundle.file(spec.file), MAX_TOKENIZER_BYTES)
            self._vocabulary = _vocabulary(data)
            _check_vocabulary(self._vocabulary, spec)
        except Exception as error:  # the library raises a bare Exception
            problem = f"its tokenizer cannot be read: {first_line(error)}"
            raise StartupError(f"bundle {bundle.manifest.reference}: {problem}") from error
        self._backend = self._vocabulary.backend
        self.unknown_id = self._vocabulary.unknown_id
        self.mask_id = spec.mask_id
        self.mask_token = spec.mask_token
        self.vocab_size = spec.vocab_size
        self._marks_spaces = not isinstance(self._backend.model, WordPiece)
        self._prefix = getattr(self._backend.model, "continuing_subword_prefix", None)
        self.special = bundle.manifest.special_tokens
        self.truncation_side = spec.truncation_side

    def ids(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the ids of each text, without special tokens and without truncation."""
        if sum(map(len, texts)) > _SHORT:
            long = [array("i") for _ in texts]  # a list has 36 bytes per id
            for piece, encoding in self._in_pieces(texts, self._backend.encode_batch_fast):
                long[piece.text].extend(encoding.ids)
            return long
        if (known := self._vocabulary.words) is None:
            return [self._backend.encode(text, add_special_tokens=False).ids for text in texts]
        ids: list[list[int]] = []
        for text in texts:
            words = _WORD.findall(text)
            try:
                ids.append(list(chain.from_iterable(map(known.__getitem__, words))))
            except KeyError:
                ids.append(self._learn(text, words, known))
        return ids

    def _in_pieces(
        self, texts: Sequence[str], encode: Callable[..., list[BackendEncoding]]
    ) -> Iterator[tuple[Piece, BackendEncoding]]:
        """Yield the pieces of texts with their encodings, group by group."""
        vocabulary = self._vocabulary
        for group in groups(texts, vocabulary.boundary, expands=vocabulary.expands):
            check_awaited()
            encodings = encode([piece.content for piece in group], add_special_tokens=False)
            yield from zip(group, encodings, strict=True)

    def _learn(self, text: str, words: Sequence[str], known: dict[str, list[int]]) -> list[int]:
        """Return the ids of a text, and remember those of its words if it is plain."""
        if not _PLAIN.fullmatch(text):
            return self._backend.encode(text, add_special_tokens=False).ids
        ids_of = {word: known.get(word) for word in words}
        missing = [word for word, ids in ids_of.items() if ids is None]
        encoding = self._backend.encode(" ".join(missing), add_special_tokens=False)
        new: dict[str, list[int]] = {word: [] for word in missing}
        for number, token in zip(encoding.word_ids, encoding.ids, strict=True):
            assert number is not None  # only special tokens have no word
            new[missing[number]].append(token)
        ids_of |= new
        if len(known) + len(new) > _MOST_WORDS:
            known.clear()
        known.update((word, ids) for word, ids in new.items() if len(word) <= _LONGEST_WORD)
        return list(chain.from_iterable(ids_of[word] or () for word in words))

    def word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the ids of words or labels, each tokenized alone.

        The name of a special token is text like any other.
        """
        vocabulary = self._vocabulary
        known = vocabulary.alone
        ids_of = {word: known.get(word) for word in words}
        missing = [word for word, ids in ids_of.items() if ids is None]
        for first in range(0, len(missing), _SHORT):
            check_awaited()
            part = missing[first : first + _SHORT]
            for word, encoding in zip(
                part, self._backend.encode_batch_fast(part, add_special_tokens=False), strict=True
            ):
                if vocabulary.added.search(word):
                    encoding = vocabulary.literal.encode(word, add_special_tokens=False)
                ids_of[word] = encoding.ids
        if len(known) + len(missing) > _MOST_WORDS:
            known.clear()
        known.update(
            (word, ids_of[word] or [])
            for word in missing[:_MOST_WORDS]
            if len(word) <= _LONGEST_WORD
        )
        return [ids_of[word] or [] for word in words]

    def spans(self, text: str, enough: int | None = None, *, words: Words = "tokenizer") -> Spans:
        """Return the tokens of a text, or of its start that has more tokens than are enough."""
        marked = text if self._marks_spaces else None
        begins = partial(self._begins_word, text) if words == "transformers" else None
        spans = Spans()
        if len(text) <= _SHORT:
            spans.add(self._backend.encode(text, add_special_tokens=False), 0, marked, begins)
            return spans
        for piece, encoding in self._in_pieces([text], self._backend.encode_batch):
            spans.add(encoding, piece.start, marked, begins)
            if enough is not None and len(spans.ids) > enough:
                break
        return spans

    def _begins_word(self, text: str, token: int, start: int, end: int) -> bool:
        """Return whether a token begins a word for transformers' TokenClassificationPipeline.

        Word pieces are those that are longer than their text. Without a prefix for word pieces, a
        space begins a word.
        """
        if token == self.unknown_id:
            return True
        if self._prefix:
            return len(self.token_of(token)) == end - start
        return start == 0 or " " in text[start - 1 : start + 1]

    def encode(
        self, ids: Sequence[int], requests: Mapping[str, HeadRequest] | None = None
    ) -> Encoding:
        """Return the encoding ``[CLS] ids [SEP]``, with what it asks of the heads."""
        input_ids = np.array([self.special.cls, *ids, self.special.sep], np.int32)
        return Encoding(input_ids, np.zeros(len(input_ids), np.int32), requests or {})

    def pair(
        self,
        first: Sequence[int],
        second: Sequence[int],
        max_tokens: int,
        requests: Mapping[str, HeadRequest] | None = None,
        *,
        keep_end: bool = False,
    ) -> Encoding:
        """Return the encoding ``[CLS] first [SEP] second [SEP]``; see `encode`.

        Some tokenizers have two ``[SEP]`` between the texts. If the encoding has more than
        ``max_tokens``, the longer text is cut first, as by transformers' strategy
        ``longest_first``: at its end, or at its start to keep the end.
        """
        room = max_tokens - self.special.pair_tokens
        if len(first) + len(second) > room:
            shorter = min(len(first), len(second), room // 2)
            kept = shorter if len(first) <= len(second) else room - shorter
            if keep_end:
                first, second = first[len(first) - kept :], second[len(second) - room + kept :]
            else:
                first, second = first[:kept], second[: room - kept]
        types = self.special.pair_types(len(first), len(second))
        input_ids = np.array(self.special.pair(first, second), np.int32)
        return Encoding(input_ids, types, requests or {})

    def decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the texts of ids: word pieces joined, no spaces before punctuation."""
        if sum(map(len, sequences)) <= _SHORT:
            decode = self._backend.decode
            return [decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]
        return self._backend.decode_batch(sequences, skip_special_tokens=skip_special_tokens)

    def token_of(self, token_id: int) -> str:
        """Return the token of an id, with its ``##`` prefix if the token continues a word."""
        token = self._backend.id_to_token(token_id)
        assert token is not None  # ids come from the same vocabulary
        return token

    def join(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens: word pieces joined."""
        decoder = self._backend.decoder
        return decoder.decode(list(tokens)) if decoder else " ".join(tokens)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if the token is not in the vocabulary."""
        return self._backend.token_to_id(token)

    def mask_positions(self, ids: Sequence[int]) -> list[int]:
        """Return the indices of the mask tokens."""
        return [index for index, token in enumerate(ids) if token == self.mask_id]


def _vocabulary(data: bytes) -> _Vocabulary:
    """Return the vocabulary of a tokenizer's file, the one in use if a file has these bytes."""
    key = hashlib.sha256(data).digest()
    if (vocabulary := _IN_USE.get(key)) is None:
        backend, parts = Backend.from_str(data.decode()), json.loads(data)
        model, unknown_id = parts["model"], None
        if model["type"] == "Unigram":
            unknown_id = model["unk_id"]
        elif (unknown := model["unk_token"]) is not None:
            unknown_id = backend.token_to_id(unknown)
            if unknown_id is None:
                raise ValueError(f"its vocabulary lacks the unknown token {unknown!r}")
        size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        boundary = find_boundary(parts)
        # The library looks for added tokens before it divides a text into words.
        contents = [token["content"] for token in parts["added_tokens"]]
        added = all(_NOT_PLAIN.search(content) for content in contents)
        whole_words = boundary is SPACE_OR_PUNCTUATION and isinstance(backend.model, WordPiece)
        words: dict[str, list[int]] | None = {} if whole_words and added else None
        normalizer = backend.normalizer
        form = _LONGEST_FORM if normalizer is None else normalizer.normalize_str(_LONGEST_FORM)
        names = re.compile("|".join(map(re.escape, contents)) or "(?!)")
        vocabulary = _Vocabulary(backend, boundary, len(form) > 1, unknown_id, size, words, names)
        _IN_USE[key] = vocabulary
    return vocabulary


def _check_vocabulary(vocabulary: _Vocabulary, spec: TokenizerSpec) -> None:
    """Raise ValueError unless a tokenizer is the one that a manifest describes."""
    backend = vocabulary.backend
    if not isinstance(backend.model, BPE | Unigram | WordPiece):
        raise ValueError(f"it is {type(backend.model).__name__}, not WordPiece, BPE or Unigram")
    if backend.truncation is not None or backend.padding is not None:
        raise ValueError("it truncates or pads, which a bundle's tokenizer does not")
    if vocabulary.size != spec.vocab_size:
        raise ValueError(
            f"it has {vocabulary.size} tokens, but the manifest's vocab_size is {spec.vocab_size}"
        )
    if spec.mask_token is not None and backend.token_to_id(spec.mask_token) != spec.mask_id:
        raise ValueError(f"its id of {spec.mask_token!r} is not the manifest's {spec.mask_id}")
