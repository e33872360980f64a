"""Sentences and questions for the quality gate, written for it: the gate needs no data sets."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from tokenizers import Tokenizer

from cloze.export.measure.pairs import ScoredPair
from cloze.export.measure.scorer import Floats, Row
from cloze.model_store.heads.head import Frozen

_TEXTS = json.loads(Path(__file__).with_name("gate-texts.json").read_text(encoding="utf-8"))
SENTENCES: tuple[str, ...] = tuple(_TEXTS["sentences"])
NAMING_SENTENCES: tuple[str, ...] = tuple(_TEXTS["naming"])
"""Sentences with persons, organizations, places, dates, products, events and animals."""

QUESTIONS: tuple[tuple[str, str], ...] = tuple(map(tuple, _TEXTS["questions"]))
"""Questions, each with a context that contains the answer."""


class GateTexts:
    """The gate's texts as token ids of one checkpoint, truncated to the checkpoint's limit.

    Args:
        type_vocab_size: number of token types; 0: the checkpoint has no token types.
        mask_id: id of the mask token; None: the vocabulary has no mask token.
        max_tokens: the longest sequence.
        scored_pairs: sentence pairs with similarity scores (STS-B) to rank; may be empty.
        options: the heads' sections of the manifest, by head name.
        label_vectors: of a bi-encoder, the vectors [l, d] of the labels of the gate of entities.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        type_vocab_size: int,
        mask_id: int | None,
        max_tokens: int,
        scored_pairs: Sequence[ScoredPair] = (),
        options: Mapping[str, Frozen] = MappingProxyType({}),
        label_vectors: Floats | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.mask_id = mask_id
        self.max_tokens = max_tokens
        self.scored_pairs = scored_pairs
        self.options = options
        self.label_vectors = label_vectors
        self._truncating = Tokenizer.from_str(tokenizer.to_str())
        self._truncating.enable_truncation(max_tokens)
        self._largest_type = max(0, type_vocab_size - 1)

    def sentences(self) -> list[Row]:
        """Return each sentence; the token types are 0."""
        return [(ids, np.zeros_like(ids)) for ids, _ in self._encode(SENTENCES)]

    def word_ids(self, word: str) -> list[int]:
        """Return the token ids of a word alone."""
        ids: list[int] = self.tokenizer.encode(word, add_special_tokens=False).ids
        return ids

    def row(self, ids: Sequence[int]) -> Row:
        """Return the sequence of token ids between the start and the end token."""
        around = self.tokenizer.encode("a").ids
        sequence = np.array([around[0], *ids, around[-1]])
        return sequence, np.zeros_like(sequence)

    def sentence_pairs(self) -> list[Row]:
        """Return pairs: neighbouring sentences and others."""
        count = len(SENTENCES)
        pairs = [
            (SENTENCES[i], SENTENCES[(i + step) % count]) for i in range(count) for step in (1, 7)
        ]
        for _, context in QUESTIONS:
            half = len(context) // 2
            pairs.append((context[:half], context[half:]))
        return self._encode(pairs)

    def questions(self) -> list[Row]:
        """Return every question with every context."""
        return self._encode(
            [(question, context) for question, _ in QUESTIONS for _, context in QUESTIONS]
        )

    def _encode(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[Row]:
        return [
            (
                np.array(encoding.ids, np.int64),
                np.minimum(np.array(encoding.type_ids, np.int64), self._largest_type),
            )
            for encoding in self._truncating.encode_batch(list(texts))
        ]
