"""Writes the graph of a model: the trunk in the precision's layout, and a head for each task."""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from export.errors import ExportError
from export.graph.builder import OPSET, GraphBuilder, Stored
from export.graph.heads import dense_embedding, masked_lm, next_sentence, packed_embedding, span
from export.graph.layouts import Dense, Packed
from export.graph.products import Fp16, Fp32, Int8, Products, round_to_integers
from export.graph.trunk import trunk
from export.models import EncoderConfig, Model
from export.sentence import EmbeddingRecipe
from model_store.manifest import Graph, Layout, Precision, Task, Weights

LAYOUTS = {Precision.FP32: Layout.DENSE, Precision.INT8: Layout.DENSE, Precision.FP16: Layout.PACKED}
"""fp32 and int8 are for a CPU, fp16 for CUDA."""

GRAPH_FILES = {Precision.FP32: "dense.onnx", Precision.INT8: "dense-int8.onnx", Precision.FP16: "packed-fp16.onnx"}
WEIGHTS_FILES = {Precision.FP32: "weights.bin", Precision.INT8: "weights-int8.bin", Precision.FP16: "weights-fp16.bin"}


_HEAD_STEP, _LARGEST_HEAD = 8, 256
"""Sizes of heads that the flash kernel takes."""


class GraphWriter:
    """Writes a model's graphs into one folder; weights that two of them have lie there once.

    Args:
        model: has the heads that the tasks need.
        recipe: how ``embed`` pools.
        tasks: which heads to write.
        folder: an existing folder.
        weights: how matrices are kept; the model's are such numbers already (`round_weights`).
        smoothing: of what is quantised, see `Int8`.
    """

    def __init__(
        self,
        model: Model,
        recipe: EmbeddingRecipe,
        tasks: Collection[Task],
        folder: Path,
        weights: Weights = Weights.FP32,
        smoothing: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._model, self._recipe, self._tasks, self._folder, self._weights = model, recipe, tasks, folder, weights
        self._smoothing = smoothing or {}
        self._stored: dict[str, Stored] = {}

    @torch.no_grad()
    def write(self, precision: Precision = Precision.FP32) -> Graph:
        """Write a graph of that precision, and those of its weights that are not there yet.

        Returns:
            What the manifest says of it.
        """
        model, tasks, integers = self._model, self._tasks, self._weights is Weights.INT8
        kept = self._smoothing if integers else None
        products: Products
        match precision:
            case Precision.INT8:
                products = Int8(self._smoothing, integers=integers)
            case Precision.FP16:
                _check_heads(model.config)
                products = Fp16(kept)
            case Precision.FP32:
                products = Fp32(kept)
        g = GraphBuilder(half=self._weights is not Weights.FP32)
        packed = LAYOUTS[precision] is Layout.PACKED
        rows = hidden = trunk(g, Packed() if packed else Dense(), products, model)
        if not packed:
            shape = g.weight("rows_shape", np.array([-1, model.config.hidden_size], np.int64))
            rows = g.op("Reshape", [hidden, shape])  # [B, S, H] -> [T, H]
        if Task.FILL_MASK in tasks:
            assert model.masked_lm is not None
            masked_lm(g, products, rows, model.masked_lm, model.config.activation)
        if Task.NSP in tasks:
            assert model.next_sentence is not None
            next_sentence(g, products, rows, model.next_sentence)
        if Task.QA in tasks:
            assert model.span is not None
            span(g, products, rows, model.span)
        if Task.EMBED in tasks and packed:
            packed_embedding(g, products, rows, self._recipe, model.config.hidden_size)
        elif Task.EMBED in tasks:
            dense_embedding(g, hidden, self._recipe, model.config.hidden_size)
        file = GRAPH_FILES[precision]
        self._stored |= g.save(self._folder / file, self._folder / WEIGHTS_FILES[precision], self._stored)
        return Graph(
            file=file,
            layout=LAYOUTS[precision],
            precision=precision,
            weights=self._weights,
            opset=OPSET,
            operators=g.operators(),
        )


def _check_heads(config: EncoderConfig) -> None:
    """CUDA's attention of unlike lengths has a fast kernel for some sizes of heads; of others each layer waits for the host."""
    size = config.hidden_size // config.heads
    if size % _HEAD_STEP or size > _LARGEST_HEAD:
        raise ExportError(
            f"heads of {size} numbers have no fast attention in fp16, only multiples of {_HEAD_STEP} up to {_LARGEST_HEAD}; "
            "leave out --precision fp16"
        )


def check_layout(precisions: Collection[Precision], layout: Layout | None) -> None:
    """A layout that was asked for must be that of a graph that was asked for.

    Raises:
        ExportError: it is not.
    """
    there = {LAYOUTS[precision] for precision in precisions or (Precision.FP32,)}
    if layout is not None and there != {layout}:
        of_it = ", ".join(precision for precision, its in LAYOUTS.items() if its is layout)
        raise ExportError(f"the layout {layout} is that of {of_it}; leave out --layout, or ask for --precision {of_it}")


def round_weights(model: Model, recipe: EmbeddingRecipe, weights: Weights, smoothing: Mapping[str, Tensor]) -> None:
    """Give every matrix, in place, the nearest values that can be kept as ``weights``, so that the graph is exact.

    Args:
        model: its parameters.
        recipe: its projections.
        weights: what they are to be kept as; of int8, matrices outside the encoder and its word embeddings are kept as fp16.
        smoothing: of what is kept as integers.

    Raises:
        ExportError: a weight is too large for fp16.
    """
    if weights is Weights.FP32:
        return
    integers = round_to_integers(model, smoothing) if weights is Weights.INT8 else set[Tensor]()
    for module in (model, *recipe.projections):
        _round_to_fp16(module, integers)


@torch.no_grad()
def _round_to_fp16(module: nn.Module, but: Collection[Tensor]) -> None:
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1 and parameter not in but:
            rounded = parameter.half().float()
            if not rounded.isfinite().all():
                raise ExportError(f"{name} holds {float(parameter.abs().max()):.3g}, which fp16 cannot; use fp32 weights")
            parameter.copy_(rounded)
