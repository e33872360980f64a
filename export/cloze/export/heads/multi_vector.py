"""Multi-vector, and the lexical weights beside it: torch modules, graphs and gate figures.

Their layers lie outside the encoder, so checkpoints of every family may have the heads.
"""

from collections.abc import Iterable
from typing import Final, cast

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from cloze.export.errors import ExportError
from cloze.export.graph.builder import linear
from cloze.export.graph.trunk import TrunkGraph
from cloze.export.heads.embedding import Projection, Step, UnitLength
from cloze.export.heads.head import (
    ExportHead,
    HeadGraph,
    HeadSetup,
    SampleSizes,
    figure,
    mean_cosine,
    mean_cosine_of_weights,
    on_rows,
    token_rows,
)
from cloze.model_store.heads import lexical, multi_vector
from cloze.model_store.heads.lexical import LexicalOptions
from cloze.model_store.heads.multi_vector import LateInteraction, MultiVectorRequest
from cloze.model_store.layouts import Layout
from cloze.model_store.tensors import INPUT_IDS

_NAME: Final = multi_vector.HEAD.name
_STD = 0.02
"""Standard deviation of new weights, as in all heads (Devlin et al. 2019)."""


class MultiVectorHead(nn.Module):
    """Projects each token, and scales its vector to length 1.

    Args:
        steps: the dense layers, of which the first has the encoder's hidden states.
        options: the head's section of the manifest.
    """

    def __init__(self, steps: Iterable[Step], options: LateInteraction) -> None:
        super().__init__()
        self.steps = nn.ModuleList([*steps, UnitLength()])
        self.options = options

    def forward(self, rows: Tensor) -> Tensor:
        """Return the vectors [V, D] of ``rows`` [V, H]."""
        for step in self.steps:
            rows = step(rows)
        return rows


def _make(setup: HeadSetup) -> MultiVectorHead:
    """Return a new head with random weights."""
    options = setup.options
    assert isinstance(options, LateInteraction)
    weight = torch.empty(options.dimensions, setup.config.hidden_size).normal_(std=_STD)
    return MultiVectorHead([Projection(weight, None)], options)


def _write_keys(head: MultiVectorHead, trunk: TrunkGraph) -> None:
    """Write the number of tokens of each sequence to which tokens attend, [B]."""
    if trunk.layout is Layout.PACKED:
        if head.options.has_unattended:
            raise ExportError(
                "queries filled with tokens to which no token attends have no fp16 graph: the "
                "variable-length kernel has no mask; leave out --precision fp16"
            )
        return
    g = trunk.g
    sequences = trunk.declare(multi_vector.KEY_SEQUENCES)
    tokens = trunk.declare(multi_vector.KEY_TOKENS)
    if not head.options.has_unattended:
        return
    batch = g.op("Shape", [INPUT_IDS.name], start=0, end=1)
    length = g.op("Cast", [g.op("Shape", [INPUT_IDS.name], start=1)], to=TensorProto.INT32)
    all_tokens = g.op("Expand", [length, batch])  # [B]
    trunk.keys = g.op("ScatterElements", [all_tokens, sequences, tokens], axis=0)


def _write(head: MultiVectorHead, graph: HeadGraph) -> None:
    rows = graph.gather(multi_vector.VECTOR_ROWS)
    for number, step in enumerate(head.steps):
        rows = cast(Step, step).write(graph.g, rows, f"multi_vector.{number}")
    graph.output(rows, multi_vector.MULTI_VECTORS, F=head.options.dimensions)


def _sample(rng: np.random.Generator, sizes: SampleSizes) -> MultiVectorRequest:
    options = sizes.options.get(_NAME)
    if not isinstance(options, LateInteraction) or not options.has_unattended:
        return MultiVectorRequest()
    return MultiVectorRequest(int(rng.integers(2, sizes.tokens, endpoint=True)))


MULTI_VECTOR: Final = ExportHead(
    head=multi_vector.HEAD,
    module=_make,
    of_family=False,
    write_keys=_write_keys,
    write=_write,
    reference=on_rows(token_rows, multi_vector.MULTI_VECTORS),
    sample=_sample,
    measure=figure(
        "multi_vector_cosine_mean", multi_vector.HEAD, mean_cosine, request=MultiVectorRequest()
    ),
    limits={"multi_vector_cosine_mean": 0.98},
    fine_tuned=True,
)


# ---- lexical weights -----------------------------------------------------------------------------


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


def _make_lexical(setup: HeadSetup) -> LexicalHead:
    """Return a new head with random weights."""
    assert isinstance(setup.options, LexicalOptions)
    weight = torch.empty(1, setup.config.hidden_size).normal_(std=_STD)
    return LexicalHead(weight, torch.zeros(1), setup.options)


def _write_lexical(head: LexicalHead, graph: HeadGraph) -> None:
    rows = graph.gather(lexical.LEXICAL_ROWS)
    weights = graph.g.op("Relu", [linear(graph.g, rows, "lexical", head.linear)])
    graph.output(weights, lexical.LEXICAL_WEIGHTS)


LEXICAL: Final = ExportHead(
    head=lexical.HEAD,
    module=_make_lexical,
    of_family=False,
    write=_write_lexical,
    reference=on_rows(token_rows, lexical.LEXICAL_WEIGHTS),
    measure=figure("lexical_cosine_mean", lexical.HEAD, mean_cosine_of_weights),
    limits={"lexical_cosine_mean": 0.98},
)
