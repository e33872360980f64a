"""Lexical weights: the layer beside a BGE-M3, torch module, graph and gate figure."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from cloze.export.graph.builder import linear
from cloze.export.heads.head import (
    ExportHead,
    HeadGraph,
    HeadSetup,
    of_sentences,
    token_rows,
)
from cloze.export.measure.scorer import Scorer
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import lexical
from cloze.model_store.heads.lexical import LexicalOptions
from cloze.model_store.layouts import Placement


class LexicalHead(nn.Module):
    """Weighs each token: ``relu(h W + b)``."""

    def __init__(self, weight: Tensor, bias: Tensor, options: LexicalOptions) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], 1)
        self.linear.weight.data, self.linear.bias.data = weight.float(), bias.float()
        self.options = options

    def forward(self, rows: Tensor) -> Tensor:
        """Return the weights [Q, 1] of ``rows`` [Q, H]."""
        weights: Tensor = self.linear(rows).relu()
        return weights


def _make(setup: HeadSetup) -> LexicalHead:
    """Return a new head with random weights."""
    assert isinstance(setup.options, LexicalOptions)
    weight = torch.empty(1, setup.config.hidden_size).normal_(std=0.02)
    return LexicalHead(weight, torch.zeros(1), setup.options)


def _write(head: LexicalHead, graph: HeadGraph) -> None:
    rows = graph.gather(lexical.LEXICAL_ROWS)
    weights = graph.g.op("Relu", [linear(graph.g, rows, "lexical", head.linear)])
    graph.output(weights, lexical.LEXICAL_WEIGHTS)


def _reference(
    head: LexicalHead, states: Tensor, requests: Sequence[Any], placement: Placement
) -> dict[str, Tensor]:
    weights: Tensor = head(states[-1][token_rows(requests, placement)])
    return {lexical.LEXICAL_WEIGHTS.name: weights}


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the mean cosine of the weights of both models, text by text."""
    cosines = []
    for pair in of_sentences((checkpoint, graph), lexical.HEAD.name, texts):
        one, other = (weights.ravel() for weights in pair)
        lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
        no_weights = not (one.any() or other.any())
        cosines.append(float(one @ other) / lengths if lengths else float(no_weights))
    return {"lexical_cosine_mean": float(np.mean(cosines))}


EXPORT_HEAD: Final = ExportHead(
    head=lexical.HEAD,
    module=_make,
    of_family=False,
    write=_write,
    reference=_reference,
    measure=_measure,
    limits={"lexical_cosine_mean": 0.98},
)
