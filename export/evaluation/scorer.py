"""One interface to the models that are evaluated: exported graphs, and torch models.

`cloze.export.model` runs torch models.

All sequences of one call have one length, so no sequence is padded. Shapes: B sequences of S
tokens, M masks, K predictions, D dimensions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cloze.export.graph.session import Session
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs
from cloze.model_store.heads import (
    GraphSpec,
    HeadRequest,
    embedding,
    masked_lm,
)
from cloze.model_store.heads.head import Frozen
from cloze.model_store.heads.masked_lm import MaskedLMRequest, MaskedLMResult

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_BATCH = 64


class Scorer(Protocol):
    """Runs encodings through a model, for evaluation."""

    @property
    def layers(self) -> int:
        """Return the number of layers of the encoder."""
        ...

    def run(self, batch: Sequence[Encoding]) -> list[HeadOutputs]:
        """Return the results of encodings of one length, in order."""
        ...


class GraphScorer:
    """Runs an exported graph."""

    def __init__(self, session: Session, graph: GraphSpec) -> None:
        self._session, self.layers = session, graph.layers
        self._codec = BatchCodec(graph)

    def run(self, batch: Sequence[Encoding]) -> list[HeadOutputs]:
        """Return the results of encodings of one length, in order."""
        packed = self._codec.pack(batch)
        outputs = self._session.run(packed.outputs, packed.feeds)
        return packed.unpack(dict(zip(packed.outputs, outputs, strict=True)))


@dataclass(frozen=True, slots=True)
class Subject:
    """The model to measure: a checkpoint on torch, or a bundle on its own graph."""

    scorer: Scorer
    tokenizer: CheckpointTokenizer
    heads: frozenset[str]
    max_tokens: int
    options: Mapping[str, Frozen] = field(default_factory=dict)


def score_masks(
    scorer: Scorer, input_ids: Ids, token_type_ids: Ids, positions: Ids, labels: Ids, *, k: int
) -> tuple[Ids, Floats]:
    """Predict masked tokens.

    Args:
        input_ids: [B, S].
        token_type_ids: [B, S].
        positions: [M], indices into the flattened [B * S].
        labels: [M], vocabulary ids.

    Returns:
        The most probable ids [M, K], and the log probability [M] of each label in nats.
    """
    length = input_ids.shape[1]
    name = masked_lm.HEAD.name
    # Indices into `positions` of the masks of each sequence.
    masks = [np.flatnonzero(positions // length == row) for row in range(len(input_ids))]
    requests: list[dict[str, HeadRequest]] = [
        {name: MaskedLMRequest((positions[own] % length).tolist(), k, labels[own].tolist())}
        if len(own)
        else {}
        for own in masks
    ]
    best = np.zeros((len(positions), k), np.int64)
    log_probabilities = np.zeros(len(positions), np.float32)
    outputs = scorer.run(encodings(input_ids, token_type_ids, requests))
    for own, output in zip(masks, outputs, strict=True):
        if not len(own):
            continue
        result: MaskedLMResult = output[name]
        best[own] = result.top_ids
        # Every label is a target of every mask of its sequence. The diagonal has each mask's own.
        log_probabilities[own] = np.diagonal(result.target_logits) - result.logsumexp
    return best, log_probabilities


_REQUEST: Final = HeadRequest()


def head_arrays(
    scorer: Scorer,
    head: str,
    input_ids: Ids,
    token_type_ids: Ids | None = None,
    request: HeadRequest = _REQUEST,
) -> Floats:
    """Return what a head computes of each sequence of ``[B, S]``: [B, ...]; see the head.

    Args:
        token_type_ids: [B, S]; None: zeros.
    """
    types = np.zeros_like(input_ids) if token_type_ids is None else token_type_ids
    outputs = scorer.run(encodings(input_ids, types, [{head: request}] * len(input_ids)))
    return np.stack([output[head].array for output in outputs])


def unit_embeddings(scorer: Scorer, rows: Sequence[Sequence[int]]) -> Floats:
    """Return the embeddings [N, D], of length 1, of sequences of any lengths."""
    vectors: dict[int, Floats] = {}
    for group in equal_lengths([len(ids) for ids in rows], _BATCH):
        ids = np.asarray([rows[index] for index in group], np.int64)
        embedded = head_arrays(scorer, embedding.HEAD.name, ids)
        vectors |= zip(group, embedded, strict=True)
    matrix = np.stack([vectors[index] for index in range(len(rows))])
    unit: Floats = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    return unit


def encodings(
    input_ids: Ids, token_type_ids: Ids, requests: Sequence[Mapping[str, HeadRequest]]
) -> list[Encoding]:
    """Return one encoding per row of ``[B, S]``."""
    rows = zip(input_ids.astype(np.int32), token_type_ids.astype(np.int32), requests, strict=True)
    return [Encoding(*row) for row in rows]


def equal_lengths(lengths: Sequence[int], max_size: int) -> Iterator[list[int]]:
    """Yield groups of indices of at most ``max_size`` examples of one length, shortest first."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for _, group in groupby(order, key=lengths.__getitem__):
        members = list(group)
        yield from (members[at : at + max_size] for at in range(0, len(members), max_size))
