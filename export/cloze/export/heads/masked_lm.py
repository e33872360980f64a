"""Masked language modelling, and sparse embeddings: one torch module, graphs and gate figures."""

from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from cloze.export.blocks.layer import ACTIVATIONS, make_norm
from cloze.export.graph.builder import GraphBuilder, layer_norm
from cloze.export.heads.head import (
    ExportHead,
    HeadBatch,
    HeadGraph,
    HeadSetup,
    SampleSizes,
    mean_cosine_of_weights,
    write_activated,
)
from cloze.export.measure.scorer import Scorer, mask_each, run_rows, score_masks
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import masked_lm, sparse_embedding
from cloze.model_store.heads.masked_lm import MaskedLMRequest
from cloze.model_store.heads.sparse_embedding import SparseEmbeddingRequest
from cloze.model_store.tensors import WORD_TABLE

_TOP_K = 5
_GATE_TOP_K = 64


class MaskedLMHead(nn.Module):
    """A transform, then the product with the word embeddings, which the decoder shares.

    Where a family has the tensor ``rest`` [H - E, V], the transform keeps the hidden size, and the
    channels that are beyond the width of the embeddings have weights of their own.
    Sources: Devlin et al. 2019, section 3.1, task 1; Sun et al. 2020.
    """

    def __init__(self, setup: HeadSetup) -> None:
        super().__init__()
        config = setup.config
        width, size = config.embedding_width, config.hidden_size
        self.rest = None
        if "rest" in setup.spec.tensors.values():
            self.rest = nn.Parameter(torch.randn(size - width, config.vocab_size) / 50)
            width = size
        self.transform = nn.Linear(size, width, config.has_bias("head"))
        name = setup.spec.activation or config.head_activation or config.activation
        self.activation = ACTIVATIONS[name]
        self.norm = make_norm(config, width)
        has_bias = config.has_bias("decoder")
        self.decoder = nn.Linear(config.embedding_width, config.vocab_size, has_bias)
        self.decoder.weight = setup.encoder.embeddings.word.weight

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits [M, V] of ``rows`` [M, H]."""
        rows = self.norm(self.activation.forward(self.transform(rows)))
        width = self.decoder.in_features
        logits: Tensor = self.decoder(rows[..., :width])
        return logits if self.rest is None else logits + rows[..., width:] @ self.rest


def write_logits(head: MaskedLMHead, graph: HeadGraph, rows: str) -> str:
    """Write the logits [M, V] of ``rows`` [M, H], both float32."""
    g = graph.g
    rows = write_activated(g, rows, "masked_lm.transform", head.transform, head.activation)
    rows = layer_norm(g, rows, "masked_lm.norm", head.norm)
    weight = head.decoder.weight
    values: Tensor | None = head.decoder.bias
    if values is None:
        values = weight.new_zeros(len(weight))
    bias = g.weight("masked_lm.decoder.bias", values)
    if head.rest is not None:
        sizes = g.ints(head.decoder.in_features, len(head.rest))
        rows = g.op("Split", [rows, sizes], outputs=2, axis=1)
        rest = g.op("MatMul", [f"{rows}_1", g.weight("masked_lm.rest", head.rest)])
        bias = g.op("Add", [rest, bias])  # [M, V]
    return graph.linear_ops.tied_logits(rows, WORD_TABLE, weight, bias)


def _write(head: MaskedLMHead, graph: HeadGraph) -> None:
    """Write top-k, log-sum-exp and requested logits: k numbers per mask leave the graph, not V."""
    g = graph.g
    logits = write_logits(head, graph, graph.gather(masked_lm.MASK_ROWS))
    top = g.op("TopK", [logits, graph.input(masked_lm.TOP_K)], outputs=2, axis=1)
    graph.output(top, masked_lm.TOP_LOGITS)
    graph.output(f"{top}_1", masked_lm.TOP_IDS)
    largest = g.op("Gather", [top, g.ints(0)], axis=1)  # [M, 1]
    graph.output(_logsumexp(g, logits, largest), masked_lm.LOGSUMEXP)

    masks = g.op("Unsqueeze", [graph.input(masked_lm.TARGET_MASKS), g.ints(1)])
    targets = g.op("Unsqueeze", [graph.input(masked_lm.TARGET_IDS), g.ints(1)])
    pairs = g.op("Concat", [masks, targets], axis=1)  # [N, 2]
    indices = g.op("Cast", [pairs], to=7)
    graph.output(g.op("GatherND", [logits, indices]), masked_lm.TARGET_LOGITS)


def _logsumexp(g: GraphBuilder, logits: str, largest: str) -> str:
    """Write the log-sum-exp [M] of ``logits`` [M, V]; ``largest`` [M, 1] has each row's maximum.

    Do not use ``ReduceLogSumExp``: for zero rows onnxruntime 1.31 returns a wrong shape. Do not
    use ``ReduceMax``: on CUDA the operator needs cuDNN, and TopK has already found the maximum.
    """
    axis = g.ints(1)
    exponentials = g.op("Exp", [g.op("Sub", [logits, largest])])
    total = g.op("ReduceSum", [exponentials, axis], keepdims=1)
    return g.op("Squeeze", [g.op("Add", [g.op("Log", [total]), largest]), axis])


def _reference(head: MaskedLMHead, batch: HeadBatch) -> dict[str, Tensor]:
    asked: list[tuple[slice, MaskedLMRequest]] = batch.asked()
    positions = [rows.start + position for rows, one in asked for position in one.positions]
    logits = head(batch.rows[positions])  # [M, V]
    top = logits.topk(max([1, *(request.top_k for _, request in asked)]), dim=1)
    targets = [logits.new_zeros(0)]
    own_logits = logits.split([len(request.positions) for _, request in asked])
    for own, (_, request) in zip(own_logits, asked, strict=True):
        targets.append(own[:, list(request.targets)].flatten())
    return {
        masked_lm.TOP_LOGITS.name: top.values,
        masked_lm.TOP_IDS.name: top.indices,
        masked_lm.LOGSUMEXP.name: logits.logsumexp(1),
        masked_lm.TARGET_LOGITS.name: torch.cat(targets),
    }


def _sample(rng: np.random.Generator, sizes: SampleSizes) -> MaskedLMRequest:
    positions = rng.choice(sizes.tokens, min(3, sizes.tokens), replace=False).tolist()
    return MaskedLMRequest(positions, _TOP_K, rng.integers(0, sizes.vocabulary, _TOP_K).tolist())


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the share of tokens, each masked alone, for which both models predict one token."""
    assert texts.mask_id is not None
    rows = []
    for ids, _ in texts.sentences():
        rows += mask_each(ids, range(1, len(ids) - 1), texts.mask_id)
    one, other = (
        np.array([top[0, 0] for top, _ in score_masks(scorer, rows, k=1)])
        for scorer in (checkpoint, graph)
    )
    return {"fill_mask_top1_agreement": float((one == other).mean())}


MASKED_LM: Final = ExportHead(
    head=masked_lm.HEAD,
    module=MaskedLMHead,
    write=_write,
    reference=_reference,
    sample=_sample,
    measure=_measure,
    classes=("ForMaskedLM", "ForPreTraining"),
    limits={"fill_mask_top1_agreement": 0.95},
)


# ---- sparse embeddings ---------------------------------------------------------------------------


def _write_sparse(head: MaskedLMHead, graph: HeadGraph) -> None:
    """Write the largest weights of each sequence. A weight grows with its logit."""
    g, vocabulary = graph.g, head.decoder.out_features
    sequences = graph.input(sparse_embedding.SPARSE_ROWS)  # [U, W]
    flat = g.op("Reshape", [sequences, g.ints(-1)])
    rows = graph.linear_ops.to_float32(g.op("Gather", [graph.rows, flat], axis=0))
    logits = write_logits(head, graph, rows)  # [U * W, V]
    shape = g.op("Concat", [g.op("Shape", [sequences]), g.ints(vocabulary)], axis=0)
    grouped = g.op("Reshape", [logits, shape], allowzero=1)  # [U, W, V]
    largest = g.op("ReduceMax", [grouped, g.ints(1)], keepdims=0)
    weights = g.op("Log", [g.op("Add", [g.op("Relu", [largest]), g.number(1.0)])])
    top = g.op("TopK", [weights, graph.input(sparse_embedding.SPARSE_TOP_K)], outputs=2, axis=1)
    graph.output(top, sparse_embedding.SPARSE_WEIGHTS)
    graph.output(f"{top}_1", sparse_embedding.SPARSE_IDS)


def _reference_sparse(head: MaskedLMHead, batch: HeadBatch) -> dict[str, Tensor]:
    asked: list[tuple[slice, SparseEmbeddingRequest]] = batch.asked()
    vectors = [head(batch.rows[rows]).relu().log1p().amax(0, keepdim=True) for rows, _ in asked]
    stacked = torch.cat([*vectors, batch.rows.new_zeros(0, head.decoder.out_features)])
    top = stacked.topk(max([1, *(request.top_k for _, request in asked)]), dim=1)
    return {
        sparse_embedding.SPARSE_WEIGHTS.name: top.values,
        sparse_embedding.SPARSE_IDS.name: top.indices,
    }


def _sample_sparse(_: np.random.Generator, sizes: SampleSizes) -> SparseEmbeddingRequest:
    return SparseEmbeddingRequest(sizes.tokens, _TOP_K)


def _measure_sparse(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the mean cosine of both models' sparse vectors, of their largest weights."""
    name, rows = sparse_embedding.HEAD.name, texts.sentences()
    requests = [{name: SparseEmbeddingRequest(len(ids), _GATE_TOP_K)} for ids, _ in rows]
    size = texts.tokenizer.get_vocab_size()
    one, other = (
        [
            np.bincount(outputs[name].ids, outputs[name].weights, size).astype(np.float32)
            for outputs in run_rows(scorer, rows, requests)
        ]
        for scorer in (checkpoint, graph)
    )
    return {"sparse_cosine_mean": mean_cosine_of_weights(zip(one, other, strict=True))}


SPARSE_EMBEDDING: Final = ExportHead(
    head=sparse_embedding.HEAD,
    module=None,
    module_of=masked_lm.HEAD.name,
    write=_write_sparse,
    reference=_reference_sparse,
    sample=_sample_sparse,
    measure=_measure_sparse,
    limits={"sparse_cosine_mean": 0.98},
    by_default=False,
)
