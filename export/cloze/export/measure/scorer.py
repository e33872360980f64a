"""One interface to the models that are evaluated: exported graphs, and torch models.

`cloze.export.model` runs torch models.

All sequences of one call have one length, so no sequence is padded. Shapes: B sequences of S
tokens, M masks, K predictions, D dimensions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cloze.export.graph.session import Session
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs
from cloze.model_store.heads import GraphSpec, HeadRequest, embedding, masked_lm
from cloze.model_store.heads.head import Frozen
from cloze.model_store.heads.masked_lm import MaskedLMRequest, MaskedLMResult

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Row = tuple[Ids, Ids]
"""Token ids and token types of a sequence, [S] each."""

_BATCH, _BATCH_TOKENS = 64, 8192
"""Most sequences, and most tokens, of a run of the model."""


class Scorer(Protocol):
    """Runs encodings through a model, for evaluation."""

    @property
    def layers(self) -> int:
        """Return the number of layers of the encoder."""

    def run(self, batch: Sequence[Encoding]) -> list[HeadOutputs]:
        """Return the results of encodings of one length, in order."""


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


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A sequence with masks.

    Attributes:
        input_ids: int64 [S].
        token_type_ids: int64 [S].
        positions: int64 [M], at least one.
        labels: int64 [M], the vocabulary id whose log probability is asked of each mask.
    """

    input_ids: Ids
    token_type_ids: Ids
    positions: Ids
    labels: Ids


def mask_each(input_ids: Ids, positions: Iterable[int], mask_id: int) -> list[MaskedRow]:
    """Return one row per position, in which this token alone is masked and asked for."""
    rows = []
    for position in positions:
        masked = input_ids.copy()
        masked[position] = mask_id
        at = np.array([position])
        rows.append(MaskedRow(masked, np.zeros_like(masked), at, input_ids[at]))
    return rows


def score_masks(
    scorer: Scorer, rows: Sequence[MaskedRow], *, k: int
) -> Iterator[tuple[Ids, Floats]]:
    """Yield for each row the most probable ids [M, K], and the log probability [M] of each label.

    Log probabilities are in nats.
    """
    name = masked_lm.HEAD.name
    requests = [
        {name: MaskedLMRequest(row.positions.tolist(), k, row.labels.tolist())} for row in rows
    ]
    sequences = [(row.input_ids, row.token_type_ids) for row in rows]
    for outputs in run_rows(scorer, sequences, requests):
        result: MaskedLMResult = outputs[name]
        # Every label is a target of every mask of its sequence. The diagonal has each mask's own.
        yield result.top_ids, np.diagonal(result.target_logits) - result.logsumexp


def run_rows(
    scorer: Scorer, rows: Sequence[Row], requests: Sequence[Mapping[str, HeadRequest]]
) -> list[HeadOutputs]:
    """Return the results of sequences of any lengths, in order."""
    results: list[HeadOutputs] = [{}] * len(rows)
    for group in _equal_lengths([len(ids) for ids, _ in rows]):
        batch = []
        for index in group:
            ids, types = rows[index]
            batch.append(Encoding(ids.astype(np.int32), types.astype(np.int32), requests[index]))
        for index, output in zip(group, scorer.run(batch), strict=True):
            results[index] = output
    return results


PLAIN: Final = HeadRequest()
"""The request of a head that takes no options."""


def row_arrays(
    scorer: Scorer, head: str, rows: Sequence[Row], request: HeadRequest = PLAIN
) -> list[Floats]:
    """Return what a head computes of sequences of any lengths, in order; see the head."""
    outputs = run_rows(scorer, rows, [{head: request}] * len(rows))
    return [output[head].array for output in outputs]


def unit_embeddings(scorer: Scorer, rows: Sequence[Sequence[int]]) -> Floats:
    """Return the embeddings [N, D], of length 1, of sequences of any lengths."""
    sequences = [(np.asarray(ids, np.int64), np.zeros(len(ids), np.int64)) for ids in rows]
    matrix = np.stack(row_arrays(scorer, embedding.HEAD.name, sequences))
    unit: Floats = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    return unit


def _equal_lengths(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of indices of sequences of one length that one run takes, shortest first."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for length, group in groupby(order, key=lengths.__getitem__):
        members, size = list(group), max(1, min(_BATCH, _BATCH_TOKENS // length))
        yield from (members[at : at + size] for at in range(0, len(members), size))
