"""Writes the graphs of a model: the trunk in the precision's layout, and the chosen heads."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from cloze.export.adapters import ADAPTED_FILES, ADAPTED_WEIGHTS
from cloze.export.blocks.config import EncoderConfig
from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.graph.adapted import AdaptedFp32, AdaptedInt8, LowRankInputs
from cloze.export.graph.builder import GraphBuilder, StoredWeight
from cloze.export.graph.linear_ops import Fp16, Fp32, InputScale, Int8, LinearOps
from cloze.export.graph.trunk import DenseTrunk, PackedTrunk
from cloze.export.heads import EXPORT_HEADS
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.heads.head import HeadGraph, flat_rows
from cloze.export.model import Model, head_module
from cloze.model_store.adapter_section import HIDDEN, HIDDEN_ROWS
from cloze.model_store.heads import Head
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Graph, Precision, Weights

LAYOUTS = {
    Precision.FP32: Layout.DENSE,
    Precision.INT8: Layout.DENSE,
    Precision.FP16: Layout.PACKED,
}
"""The layout of each precision. fp32 and int8 are for a CPU, fp16 is for CUDA."""

GRAPH_FILES = {
    Precision.FP32: "dense.onnx",
    Precision.INT8: "dense-int8.onnx",
    Precision.FP16: "packed-fp16.onnx",
}
WEIGHTS_FILES = {
    Precision.FP32: "weights.bin",
    Precision.INT8: "weights-int8.bin",
    Precision.FP16: "weights-fp16.bin",
}

_HEAD_SIZE_STEP, _LARGEST_HEAD_SIZE = 8, 256
"""The flash kernel takes attention heads of multiples of 8 numbers, up to 256."""


class GraphWriter:
    """Writes a model's graphs into one folder; weights that two graphs share are stored once.

    Args:
        weights: the storage of matrices; the model must be rounded already (`round_weights`).
    """

    def __init__(
        self,
        model: Model,
        recipe: EmbeddingRecipe,
        heads: Sequence[Head],
        folder: Path,
        weights: Weights = Weights.FP32,
        scales: Mapping[str, InputScale] | None = None,
    ) -> None:
        self._model, self._recipe, self._heads = model, recipe, heads
        self._folder, self._weights = folder, weights
        self._scales = scales or {}
        self._stored: dict[str, StoredWeight] = {}

    @torch.no_grad()
    def write(
        self,
        precision: Precision = Precision.FP32,
        adapted: Collection[nn.Linear] | None = None,
    ) -> Graph:
        """Write a graph of a precision, and its weights that are not stored yet.

        Args:
            precision: fp32 or int8 if the graph takes adapters.
            adapted: the layers that adapters may change, in the order of the graph's inputs; None:
                the graph takes no adapters.

        Returns:
            The manifest's description of the graph.

        Raises:
            ExportError: the model's attention heads have no fast kernel in fp16.
        """
        config, layout = self._model.config, LAYOUTS[precision]
        g = GraphBuilder(half=self._weights is not Weights.FP32)
        linear_ops = self._linear_ops(g, precision, is_adapted=adapted is not None)
        if isinstance(linear_ops, AdaptedFp32 | AdaptedInt8):
            groups = [group.linears for group in self._model.encoder.products().values()]
            linear_ops.low_rank = LowRankInputs(g, adapted or (), groups)
        trunk = (PackedTrunk if layout is Layout.PACKED else DenseTrunk)(linear_ops)
        modules = {
            head.name: head_module(self._model, self._recipe, head.name) for head in self._heads
        }
        for name, module in modules.items():
            if (write_keys := EXPORT_HEADS[name].write_keys) is not None:
                write_keys(module, trunk)
        states = self._model.encoder.write(trunk)
        rows = flat_rows(g, layout, states[-1], config)
        graph = HeadGraph(linear_ops, layout, states, rows, config)
        for name, module in modules.items():
            assert module is not None  # callers choose heads that the model has
            EXPORT_HEADS[name].write(module, graph)
        if adapted is not None:
            graph.output(graph.gather(HIDDEN_ROWS), HIDDEN, H=config.hidden_size)
        file = GRAPH_FILES[precision] if adapted is None else ADAPTED_FILES[precision]
        weights_file = WEIGHTS_FILES[precision] if adapted is None else ADAPTED_WEIGHTS[precision]
        self._stored |= g.save(self._folder / file, self._folder / weights_file, self._stored)
        return Graph(
            file=file,
            layout=layout,
            precision=precision,
            weights=self._weights,
            opset=g.opset,
            operators=g.operators(),
        )

    def _linear_ops(self, g: GraphBuilder, precision: Precision, *, is_adapted: bool) -> LinearOps:
        integers = self._weights is Weights.INT8
        stored = self._scales if integers else None
        match precision:
            case Precision.INT8:
                return (AdaptedInt8 if is_adapted else Int8)(g, self._scales, integers=integers)
            case Precision.FP16:
                _check_head_size(self._model.config)
                return Fp16(g, stored)
            case Precision.FP32:
                return (AdaptedFp32 if is_adapted else Fp32)(g, stored)


def _check_head_size(config: EncoderConfig) -> None:
    """Refuse a family that is not packed, and heads without a variable-length flash kernel."""
    family, size = FAMILIES[config.family], config.head_size
    if Layout.PACKED not in family.layouts:
        raise ExportError(
            f"a {config.family} has no fp16 graph: {family.dense_because}; "
            "leave out --precision fp16"
        )
    if size % _HEAD_SIZE_STEP or size > _LARGEST_HEAD_SIZE:
        raise ExportError(
            f"heads of {size} numbers have no fast attention in fp16, only multiples of "
            f"{_HEAD_SIZE_STEP} up to {_LARGEST_HEAD_SIZE}; leave out --precision fp16"
        )
