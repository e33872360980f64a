"""Sparse embedding: graph and gate figure. The head uses the masked-language-model's module."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cloze.export.heads import masked_lm
from cloze.export.heads.head import ExportHead, HeadGraph, SampleSizes
from cloze.export.heads.masked_lm import MaskedLMHead
from cloze.export.measure.scorer import Scorer, encodings
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import sparse_embedding
from cloze.model_store.heads.sparse_embedding import SparseEmbeddingRequest
from cloze.model_store.layouts import Placement

_TOP_K = 5
_GATE_TOP_K = 64


def _write(head: MaskedLMHead, graph: HeadGraph) -> None:
    """Write the maximum of the logits over each sequence, then its weights and the largest ones.

    The weight grows with the logit, so the maximum may come first.
    """
    g, vocabulary = graph.g, head.decoder.out_features
    sequences = graph.input(sparse_embedding.SPARSE_ROWS)  # [U, W]
    flat = g.op("Reshape", [sequences, g.weight("shape_flat", np.array([-1], np.int64))])
    rows = graph.linear_ops.to_float32(g.op("Gather", [graph.rows, flat], axis=0))
    logits = masked_lm.write_logits(head, graph, rows)  # [U * W, V]
    columns = g.weight("vocabulary_size", np.array([vocabulary], np.int64))
    shape = g.op("Concat", [g.op("Shape", [sequences]), columns], axis=0)
    grouped = g.op("Reshape", [logits, shape], allowzero=1)  # [U, W, V]
    largest = g.op("ReduceMax", [grouped, g.weight("axis_1", np.array([1], np.int64))], keepdims=0)
    one = g.weight("one_float", np.array(1, np.float32))
    weights = g.op("Log", [g.op("Add", [g.op("Relu", [largest]), one])])
    top = g.op("TopK", [weights, graph.input(sparse_embedding.SPARSE_TOP_K)], outputs=2, axis=1)
    graph.output(top, sparse_embedding.SPARSE_WEIGHTS)
    graph.output(f"{top}_1", sparse_embedding.SPARSE_IDS)


def _reference(
    head: MaskedLMHead,
    states: Tensor,
    requests: Sequence[SparseEmbeddingRequest | None],
    placement: Placement,
) -> dict[str, Tensor]:
    rows = states[-1]
    starts = placement.starts.tolist()
    asked = [(i, request) for i, request in enumerate(requests) if request is not None]
    vectors = [head(rows[starts[i] : starts[i + 1]]).relu().log1p().max(0).values for i, _ in asked]
    stacked = torch.stack(vectors) if vectors else rows.new_zeros(0, head.decoder.out_features)
    top = stacked.topk(max([1, *(request.top_k for _, request in asked)]), dim=1)
    return {
        sparse_embedding.SPARSE_WEIGHTS.name: top.values,
        sparse_embedding.SPARSE_IDS.name: top.indices,
    }


def _sample(_: np.random.Generator, sizes: SampleSizes) -> SparseEmbeddingRequest:
    return SparseEmbeddingRequest(sizes.tokens, _TOP_K)


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the mean cosine of both models' sparse vectors, of their largest weights."""
    name = sparse_embedding.HEAD.name
    cosines = []
    for ids in texts.sentences():
        requests = [{name: SparseEmbeddingRequest(ids.shape[1], _GATE_TOP_K)}]
        batch = encodings(ids, np.zeros_like(ids), requests)
        cosines.append(_cosine(*(scorer.run(batch)[0][name] for scorer in (checkpoint, graph))))
    return {"sparse_cosine_mean": float(np.mean(cosines))}


def _cosine(one: Any, other: Any) -> float:
    weights = dict(zip(other.ids.tolist(), other.weights.tolist(), strict=True))
    product = sum(
        weight * weights.get(word, 0.0)
        for word, weight in zip(one.ids.tolist(), one.weights.tolist(), strict=True)
    )
    lengths = float(np.linalg.norm(one.weights) * np.linalg.norm(other.weights))
    return product / lengths if lengths else float(len(one.ids) == len(other.ids))


EXPORT_HEAD: Final = ExportHead(
    head=sparse_embedding.HEAD,
    module=None,
    module_of=masked_lm.EXPORT_HEAD.head.name,
    write=_write,
    reference=_reference,
    sample=_sample,
    measure=_measure,
    limits={"sparse_cosine_mean": 0.98},
    by_default=False,
)
