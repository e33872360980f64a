"""The heads, the same for every layout: each gathers the rows it is asked for before it computes anything."""

import numpy as np
from onnx import TensorProto

from export.graph.builder import GraphBuilder
from export.graph.layers import activated, dense, norm
from export.graph.products import WORDS, Fp32, Operand, Products
from export.models.heads import MaskedLMHead, NextSentenceHead, SpanHead
from export.sentence import EmbeddingRecipe, Pooling
from model_store import interface


def masked_lm(g: GraphBuilder, products: Products, hidden: str, head: MaskedLMHead, activation: str) -> None:
    """Top-k, log-sum-exp and asked-for logits of ``mask_rows`` of ``hidden [T, H]``: k numbers leave, not V."""
    rows = _gather(g, products, hidden, g.input(interface.MASK_ROWS, TensorProto.INT32, ["M"]))
    transform = Fp32().product(g, Operand(rows), "masked_lm.transform", head.transform)
    transform_bias = g.weight("masked_lm.transform.bias", head.transform.bias)
    rows = norm(g, activated(g, transform, transform_bias, activation), "masked_lm.norm", head.norm)
    bias = g.weight("masked_lm.decoder.bias", head.decoder.bias)
    logits = products.scores(g, rows, WORDS, head.decoder.weight, bias)  # [M, V]; the decoder is the table, tied

    top = g.op("TopK", [logits, g.input(interface.TOP_K, TensorProto.INT64, [1])], outputs=2, axis=1)
    g.output(top, interface.TOP_LOGITS, TensorProto.FLOAT, ["M", "K"])
    g.output(f"{top}_1", interface.TOP_IDS, TensorProto.INT64, ["M", "K"])
    largest = g.op("Gather", [top, g.weight("column_0", np.array([0], np.int64))], axis=1)  # [M, 1]
    g.output(_logsumexp(g, logits, largest), interface.LOGSUMEXP, TensorProto.FLOAT, ["M"])

    last = g.weight("axis_1", np.array([1], np.int64))
    masks = g.op("Unsqueeze", [g.input(interface.TARGET_MASKS, TensorProto.INT32, ["N"]), last])
    targets = g.op("Unsqueeze", [g.input(interface.TARGET_IDS, TensorProto.INT32, ["N"]), last])
    indices = g.op("Cast", [g.op("Concat", [masks, targets], axis=1)], to=TensorProto.INT64)  # [N, 2]
    g.output(g.op("GatherND", [logits, indices]), interface.TARGET_LOGITS, TensorProto.FLOAT, ["N"])


def _logsumexp(g: GraphBuilder, logits: str, largest: str) -> str:
    """[M, V] and each row's largest [M, 1] -> [M].

    Not ``ReduceLogSumExp``: on zero rows onnxruntime 1.31 gives that a wrong shape. Nor ``ReduceMax``: on CUDA it is cuDNN's, and
    TopK has found the largest already.
    """
    axis = g.weight("axis_1", np.array([1], np.int64))
    total = g.op("ReduceSum", [g.op("Exp", [g.op("Sub", [logits, largest])]), axis], keepdims=1)
    return g.op("Squeeze", [g.op("Add", [g.op("Log", [total]), largest]), axis])


def next_sentence(g: GraphBuilder, products: Products, hidden: str, head: NextSentenceHead) -> None:
    """Pooler and classifier on ``pair_rows`` of ``hidden [T, H]``."""
    rows = _gather(g, products, hidden, g.input(interface.PAIR_ROWS, TensorProto.INT32, ["P"]))
    pooled = g.op("Tanh", [dense(g, rows, "next_sentence.pooler", head.pooler)])
    logits = dense(g, pooled, "next_sentence.classifier", head.classifier)
    g.output(logits, interface.PAIR_LOGITS, TensorProto.FLOAT, ["P", 2])


def span(g: GraphBuilder, products: Products, hidden: str, head: SpanHead) -> None:
    """Start and end logits of every row of ``hidden [T, H]``."""
    logits = dense(g, products.widened(g, hidden), "span.classifier", head.classifier)
    g.output(logits, interface.SPAN_LOGITS, TensorProto.FLOAT, ["T", 2])


def dense_embedding(g: GraphBuilder, hidden: str, recipe: EmbeddingRecipe, hidden_size: int) -> None:
    """Pool ``embed_sequences`` of ``hidden [B, S, H]``, whose rows are all real tokens."""
    chosen = g.input(interface.EMBED_SEQUENCES, TensorProto.INT32, ["E"])
    sequences = g.op("Gather", [hidden, chosen], axis=0)  # [E, S, H]
    axis = g.weight("axis_1", np.array([1], np.int64))
    match recipe.pooling:
        case Pooling.MEAN:
            pooled = g.op("ReduceMean", [sequences, axis], keepdims=0)
        case Pooling.CLS:
            pooled = g.op("Gather", [sequences, g.weight("first", np.array(0, np.int64))], axis=1)
        case Pooling.MAX:
            pooled = g.op("ReduceMax", [sequences, axis], keepdims=0)
        case Pooling.MEAN_SQRT_LENGTH:
            length = g.op("Cast", [g.op("Shape", [sequences], start=1, end=2)], to=TensorProto.FLOAT)
            total = g.op("ReduceSum", [sequences, axis], keepdims=0)
            pooled = g.op("Div", [total, g.op("Sqrt", [length])])
    _embeddings(g, pooled, recipe, hidden_size)


def packed_embedding(g: GraphBuilder, products: Products, hidden: str, recipe: EmbeddingRecipe, hidden_size: int) -> None:
    """Pool the ``pool_rows`` of ``hidden [T, H]``, a row of them for each embedding."""
    sequences = _gather(g, products, hidden, g.input(interface.POOL_ROWS, TensorProto.INT32, ["E", "L"]))  # [E, L, H]
    axis = g.weight("axis_1", np.array([1], np.int64))
    if recipe.pooling is Pooling.MAX:
        pooled = g.op("ReduceMax", [sequences, axis], keepdims=0)
    else:
        weights = g.op("Unsqueeze", [g.input(interface.POOL_WEIGHTS, TensorProto.FLOAT, ["E", "L"]), axis])  # [E, 1, L]
        pooled = g.op("Squeeze", [g.op("MatMul", [weights, sequences]), axis])
    _embeddings(g, pooled, recipe, hidden_size)


def _embeddings(g: GraphBuilder, pooled: str, recipe: EmbeddingRecipe, hidden_size: int) -> None:
    """What follows pooling: [E, H] -> [E, D]."""
    for number, projection in enumerate(recipe.projections):
        pooled = dense(g, pooled, f"projection.{number}", projection.linear)
        if projection.tanh:
            pooled = g.op("Tanh", [pooled])
    g.output(pooled, interface.EMBEDDINGS, TensorProto.FLOAT, ["E", recipe.dimensions(hidden_size)])


def _gather(g: GraphBuilder, products: Products, hidden: str, rows: str) -> str:
    """Those rows of ``hidden [T, H]``, in float32."""
    return products.widened(g, g.op("Gather", [hidden, rows], axis=0))
