"""Writes the graph of a model: the trunk in one layout, and a head for each task."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch import nn

from export.errors import ExportError
from export.graph.builder import OPSET, GraphBuilder
from export.graph.heads import dense_embedding, masked_lm, next_sentence, span
from export.graph.trunk import dense_trunk
from export.models import Model
from export.sentence import EmbeddingRecipe
from model_store.manifest import Graph, Layout, Precision, Task, Weights

GRAPH_FILE = "dense.onnx"
WEIGHTS_FILE = "weights.bin"


@torch.no_grad()
def write_graph(
    model: Model, recipe: EmbeddingRecipe, tasks: Collection[Task], folder: Path, weights: Weights = Weights.FP32
) -> Graph:
    """Write ``dense.onnx`` and ``weights.bin`` into a folder.

    Args:
        model: has the heads that the tasks need.
        recipe: how ``embed`` pools.
        tasks: which heads to write.
        folder: an existing folder.
        weights: how matrices are kept; for fp16 the model's are such numbers already (`rounded`).

    Returns:
        What the manifest says of the graph.
    """
    g = GraphBuilder(half=weights is Weights.FP16)
    hidden = dense_trunk(g, model)  # [B, S, H]
    rows = g.op("Reshape", [hidden, g.weight("rows_shape", np.array([-1, model.config.hidden_size], np.int64))])  # [T, H]
    if Task.FILL_MASK in tasks:
        assert model.masked_lm is not None
        masked_lm(g, rows, model.masked_lm, model.config.activation)
    if Task.NSP in tasks:
        assert model.next_sentence is not None
        next_sentence(g, rows, model.next_sentence)
    if Task.QA in tasks:
        assert model.span is not None
        span(g, rows, model.span)
    if Task.EMBED in tasks:
        dense_embedding(g, hidden, recipe, model.config.hidden_size)
    g.save(folder / GRAPH_FILE, folder / WEIGHTS_FILE)
    return Graph(
        file=GRAPH_FILE,
        layout=Layout.DENSE,
        precision=Precision.FP32,
        weights=weights,
        opset=OPSET,
        operators=g.operators(),
    )


@torch.no_grad()
def round_to_fp16(model: nn.Module) -> None:
    """Round every matrix to the nearest fp16 number, in place, so that a graph that keeps them so is exact.

    Raises:
        ExportError: a weight is too large for fp16.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            rounded = parameter.half().float()
            if not rounded.isfinite().all():
                raise ExportError(f"{name} holds {float(parameter.abs().max()):.3g}, which fp16 cannot; use fp32 weights")
            parameter.copy_(rounded)
