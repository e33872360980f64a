"""Entities of labels that a request names: logits for spans of words, or for words.

The sequence has the labels before the words of the text: ``[CLS] <<ENT>> label ... <<SEP>> words
[SEP]``. A word is the row of its first token, and a label the row of its marker. The result is the
logits [w, k, l] of a text with w words and l labels: of the spans of 1 to k words that start at
each word, or k = 3 logits of a word as the start, the end and the inside of an entity. A span that
ends behind the last word is no entity.

A bi-encoder has an encoder of its own for labels (`cloze.model_store.manifest`). Its sequence is
``[CLS] words [SEP]``, and a request has the vectors of its labels.

Source: Zaratiana et al. 2023, "GLiNER", and the library gliner 0.2.29.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from cloze.model_store.heads.head import (
    ArrayResult,
    Frozen,
    GraphSpec,
    Head,
    HeadRequest,
    ModelSizes,
    Outputs,
)
from cloze.model_store.layouts import Feeds, Placement
from cloze.model_store.limits import MAX_POSITIONS, MAX_WIDTH
from cloze.model_store.tensors import TensorSpec

ENTITY_WORDS: Final = TensorSpec(
    "entity_words", "int32", ("e", "w"), "the row of `hidden` of each word's first token; rest 0"
)
ENTITY_WORD_COUNTS: Final = TensorSpec(
    "entity_word_counts", "int32", ("e",), "number of words of each text"
)
ENTITY_LABELS: Final = TensorSpec(
    "entity_labels", "int32", ("e", "l"), "the row of `hidden` of each label's marker; rest 0"
)
ENTITY_LABEL_VECTORS: Final = TensorSpec(
    "entity_label_vectors",
    "float32",
    ("v", "l", "d"),
    "the vector of each label, in a bi-encoder in place of `entity_labels`; rest 0; v is 1 if all "
    "texts have the same labels, else e",
)
ENTITY_SCORES: Final = TensorSpec(
    "entity_scores",
    "float32",
    ("e", "w", "k", "l"),
    "logits of the spans of 1 to k words from each word on; or of each word as start, end, inside",
)

MAX_SPAN_WORDS: Final = 64
"""Most words of a span; published models have 12."""

TOKEN_LOGITS: Final = 3
"""Logits of a word and a label: as the start, as the end, and as the inside of an entity."""

_PAIRS_PER_ROW: Final = 256
"""Pairs of a word and a label that count as one row of a vocabulary in the limit of a batch.

Their features, 4 x 1,024 numbers per pair in the largest models, need as much memory.
"""


class EntityKind(StrEnum):
    """What has a logit per label."""

    SPAN = "span"
    TOKEN = "token"
    """Words have three: as the start, as the end and as the inside of an entity."""


class EntityOptions(Frozen):
    """How texts and labels become sequences."""

    kind: EntityKind
    max_width: int = Field(gt=0, le=MAX_SPAN_WORDS, description="most words of a span")
    max_len: int = Field(gt=0, le=MAX_POSITIONS, description="most words of a sequence")
    ent_id: int | None = Field(None, ge=0, description="id of the marker before a label")
    sep_id: int | None = Field(None, ge=0, description="id of the marker between labels and words")
    embed_ent_token: bool = Field(
        True, description="whether a label is the row of its marker, and not of the next token"
    )
    label_size: int | None = Field(
        None,
        gt=0,
        le=MAX_WIDTH,
        description="numbers of the vector of a label, in a bi-encoder without markers; null: "
        "the sequence has the labels",
    )

    @model_validator(mode="after")
    def _has_markers_or_vectors(self) -> Self:
        if any((one is None) == (self.label_size is None) for one in (self.ent_id, self.sep_id)):
            raise ValueError("it needs either ent_id and sep_id or label_size")
        return self

    @property
    def logits(self) -> int:
        """Number of logits of a word and a label."""
        return self.max_width if self.kind is EntityKind.SPAN else TOKEN_LOGITS

    @property
    def token_ids(self) -> Sequence[int]:
        """See `Frozen`."""
        return [one for one in (self.ent_id, self.sep_id) if one is not None]


@dataclass(frozen=True, slots=True)
class EntityRequest(HeadRequest):
    """Score the words of a sequence for its labels.

    Attributes:
        words: positions of the words' first tokens, in order; at least one.
        labels: positions of the rows of the labels; at least one, or the vectors.
        vectors: of a bi-encoder, float32 [l, d].
    """

    words: Sequence[int]
    labels: Sequence[int] = ()
    vectors: NDArray[np.float32] | None = None

    @property
    def label_count(self) -> int:
        """Number of labels."""
        return len(self.labels) if self.vectors is None else len(self.vectors)

    @property
    def vocabulary_rows(self) -> int:  # type: ignore[override]  # a property stands for the constant
        """Pairs of words and labels, in rows of a vocabulary of about the same memory.

        A vector is as much memory as a pair.
        """
        words = len(self.words) + (self.vectors is not None)
        return words * self.label_count // _PAIRS_PER_ROW

    @property
    def padded_sizes(self) -> tuple[int, int]:  # type: ignore[override]
        """See `HeadRequest`."""
        return len(self.words), self.label_count


def _pack(
    requests: Sequence[EntityRequest | None], placement: Placement, graph: GraphSpec
) -> Feeds:
    asked = [(placement.starts[i], one) for i, one in enumerate(requests) if one is not None]
    # onnxruntime's LSTM aborts the process if it gets no sequence: without requests, one text has
    # no words and no labels.
    rows = max(1, len(asked))
    counts = np.zeros(rows, np.int32)
    counts[: len(asked)] = [len(one.words) for _, one in asked]
    words = np.zeros((rows, counts.max()), np.int32)
    most_labels = max((one.label_count for _, one in asked), default=0)
    labels = np.zeros((rows, most_labels), np.int32)
    for number, (start, one) in enumerate(asked):
        words[number, : len(one.words)] = start + np.array(one.words, np.int32)
        labels[number, : len(one.labels)] = start + np.array(one.labels, np.int32)
    feeds: Feeds = {ENTITY_WORDS.name: words, ENTITY_WORD_COUNTS.name: counts}
    options = graph.options.get(HEAD.name)
    if isinstance(options, EntityOptions) and options.label_size is not None:
        vectors = _vectors([one for _, one in asked], options.label_size)
        return feeds | {ENTITY_LABEL_VECTORS.name: vectors}
    return feeds | {ENTITY_LABELS.name: labels}


def _vectors(asked: Sequence[EntityRequest], size: int) -> NDArray[np.float32]:
    """Return the vectors [v, l, d] of the labels of texts, once if all texts share them.

    The texts of a request share one array. The graph multiplies each vector by a matrix: of 1,000
    labels per text, this would cost more than the encoder of a short text.
    """
    first = asked[0].vectors if asked else None
    if first is not None and all(one.vectors is first for one in asked):
        return first[None]
    most_labels = max((one.label_count for one in asked), default=0)
    vectors = np.zeros((max(1, len(asked)), most_labels, size), np.float32)
    for row, one in zip(vectors, asked, strict=False):
        if one.vectors is not None:
            row[: len(one.vectors)] = one.vectors
    return vectors


def _unpack(
    requests: Sequence[EntityRequest | None], _: Placement, outputs: Outputs
) -> list[ArrayResult | None]:
    rows: NDArray[np.float32] = outputs[ENTITY_SCORES.name]
    results: list[ArrayResult | None] = []
    number = 0
    for one in requests:
        if one is None:
            results.append(None)
            continue
        result = rows[number, : len(one.words), :, : one.label_count]
        # A view would keep the scores of all texts in memory, and their padding.
        results.append(ArrayResult(result.copy() if len(rows) > 1 else result))
        number += 1
    return results


def _model_sizes(sizes: ModelSizes) -> dict[str, int]:
    options = sizes.options.get(HEAD.name)
    if not isinstance(options, EntityOptions):
        return {}
    return {"k": options.logits, "d": options.label_size or 0}


HEAD: Final = Head(
    name="entities",
    task="entities",
    inputs=(ENTITY_WORDS, ENTITY_WORD_COUNTS, ENTITY_LABELS, ENTITY_LABEL_VECTORS),
    outputs=(ENTITY_SCORES,),
    request=EntityRequest,
    pack=_pack,
    unpack=_unpack,
    largest_request=lambda rows: EntityRequest([0] * (rows * _PAIRS_PER_ROW // 64), [0] * 64),
    options=EntityOptions,
    model_sizes=_model_sizes,
    rows=lambda asked: len(asked.words),
)
