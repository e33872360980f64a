"""Heads: their torch modules by formula, what checkpoints promise, and batches of mixed requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cloze.export.graph.session import open_session
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.heads.entities import score_f1
from cloze.export.measure.scorer import GraphScorer
from cloze.export.model import GraphWriter, TorchScorer
from cloze.model_store.batch import Encoding
from cloze.model_store.heads import (
    HEADS,
    GraphSpec,
    HeadRequest,
    Pooling,
    entities,
    layer_embedding,
    masked_lm,
    multi_vector,
    sparse_embedding,
)
from cloze.model_store.manifest import Graph, Precision
from tests.support.tiny_models import model

REQUESTS: list[dict[str, HeadRequest]] = [
    {
        "masked_lm": masked_lm.MaskedLMRequest([1, 3], 2, [5, 7, 6]),
        "embedding": HeadRequest(),
        "token_classification": HeadRequest(),
    },
    {
        "next_sentence": HeadRequest(),
        "span": HeadRequest(),
        "entities": entities.EntityRequest((1, 3), (2,)),
        "sparse_embedding": sparse_embedding.SparseEmbeddingRequest(5, 4),
        "layer_embedding": layer_embedding.LayerEmbeddingRequest([{0: 0.5, 2: 2.0}], Pooling.CLS),
    },
    {
        "masked_lm": masked_lm.MaskedLMRequest([0], 6),
        "sequence_classification": HeadRequest(),
        "token_embedding": HeadRequest(),
        "sparse_embedding": sparse_embedding.SparseEmbeddingRequest(5, 2),
        "lexical": HeadRequest(),
        "entities": entities.EntityRequest((1, 2, 3), (2, 4)),
    },
    {
        "multi_vector": multi_vector.MultiVectorRequest(),
        "masked_lm": masked_lm.MaskedLMRequest([2, 4], 0, [9]),
        "layer_embedding": layer_embedding.LayerEmbeddingRequest([{1: 1.0}, {2: 1.0}], Pooling.MAX),
        "embedding": HeadRequest(),
        "next_sentence": HeadRequest(),
        "token_embedding": HeadRequest(),
    },
    {},
]  # fmt: skip


def written(folder: Path, made: Any, precision: Precision) -> Graph:
    writer = GraphWriter(made, EmbeddingRecipe(), tuple(HEADS.values()), folder)
    return writer.write(precision)


def arrays_of(results: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return the arrays of all results, by sequence, head and field."""
    return {
        f"{number} {name} {field}": getattr(result, field)
        for number, output in enumerate(results)
        for name, result in output.items()
        for field in result.__dataclass_fields__
        if isinstance(getattr(result, field), np.ndarray)
    }


@pytest.mark.parametrize(
    ("precision", "tolerance"), [(Precision.FP32, 1e-5), (Precision.FP16, 0.01)]
)
def test_each_sequence_of_a_batch_has_what_it_asks_for(
    precision: Precision, tolerance: float, tmp_path: Path
) -> None:
    made = model()
    graph = written(tmp_path, made, precision)
    spec = GraphSpec(graph.layout, tuple(HEADS), token_types=True, pooling=Pooling.MEAN, layers=2)
    ids = np.random.default_rng(0).integers(5, 30, (len(REQUESTS), 5), dtype=np.int32)
    batch = [
        Encoding(row, (np.arange(5) > 2).astype(np.int32), request)
        for row, request in zip(ids, REQUESTS, strict=True)
    ]
    scorer = GraphScorer(open_session(tmp_path / graph.file, graph.layout), spec)
    assert scorer.layers == 2
    together = arrays_of(scorer.run(batch))
    torch_scorer = TorchScorer(made, torch.device("cpu"))
    assert torch_scorer.layers == 2
    alone = arrays_of([torch_scorer.run([encoding])[0] for encoding in batch])
    both = arrays_of(torch_scorer.run(batch))
    assert together.keys() == alone.keys() == both.keys()
    for name, values in together.items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(values, alone[name], atol=tolerance, err_msg=name)
            np.testing.assert_allclose(both[name], alone[name], atol=1e-5, err_msg=name)
        elif precision is Precision.FP32:
            np.testing.assert_array_equal(values, alone[name], err_msg=name)


@torch.no_grad()
def test_results_by_their_formula() -> None:
    """What a request of each kind means, from the hidden states."""
    made = model()
    ids = torch.tensor([[2, 9, 4, 8, 3]])
    states = torch.stack(made.encoder.states(ids))[:, 0]  # [N, S, H]
    scorer = TorchScorer(made, torch.device("cpu"))

    def asked(**requests: HeadRequest) -> Any:
        row = ids[0].numpy().astype(np.int32)
        [output] = scorer.run([Encoding(row, np.zeros_like(row), requests)])
        return output[next(iter(requests))]

    logits = made.masked_lm(states[-1][[2]])[0]
    result = asked(masked_lm=masked_lm.MaskedLMRequest([2], 3, [7, 5]))
    assert result.top_ids.tolist() == [logits.topk(3).indices.tolist()]
    np.testing.assert_allclose(result.top_logits[0], logits.topk(3).values, rtol=1e-5)
    np.testing.assert_allclose(result.logsumexp, [logits.logsumexp(0)], rtol=1e-5)
    np.testing.assert_allclose(result.target_logits[0], logits[[7, 5]], rtol=1e-5)

    weights = made.masked_lm(states[-1]).relu().log1p().amax(0)
    words = asked(sparse_embedding=sparse_embedding.SparseEmbeddingRequest(5, 4))
    kept = weights.topk(4).values
    np.testing.assert_allclose(words.weights, kept[kept > 0], rtol=1e-5)

    pooled = asked(embedding=HeadRequest()).array
    np.testing.assert_allclose(pooled, states[-1].mean(0), rtol=1e-4, atol=1e-6)
    request = layer_embedding.LayerEmbeddingRequest([{0: 2.0, 1: -1.0}, {2: 1.0}], Pooling.MAX)
    layers = asked(layer_embedding=request).array
    expected = torch.stack([(2 * states[0] - states[1]).amax(0), states[2].amax(0)])
    np.testing.assert_allclose(layers, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("expected", "scores", "f1"),
    [
        ([1, 1, 0, 0], [1, 0, 1, 0], 0.5),  # the usual F1
        ([0.51, 0.04], [0.49, 0.08], 0.98),  # a threshold of 0.5 would make it 0
        ([0.95], [0.05], 0.1),
        ([0.6, 0.3], [0.6, 0.5], 1.8 / 2),
        ([0, 0.02], [0.5, 0.02], 0),  # an entity of the graph alone
        ([0.1, 0], [0, 0.05], 1),  # no entities
    ],
)
def test_the_f1_of_scores(expected: list[float], scores: list[float], f1: float) -> None:
    given = (np.array(one, np.float32) for one in (expected, scores))
    assert score_f1(*given) == pytest.approx(f1)
