"""Matrix products to which low-rank matrices of adapters are added, one adapter per sequence.

The products of the base stay as they are, in fp32 or int8. What is added is fp32:

    x W^T + (x A^T) B^T

Each sequence has its own A [R, in] and B^T [R, out], gathered from tables of rows
(`cloze.model_store.adapter_section`).
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import nn

from cloze.export.graph.builder import FUSED, GraphBuilder
from cloze.export.graph.linear_ops import Fp32, Int8, LinearInput, LinearOps
from cloze.model_store import adapter_section
from cloze.model_store.layouts import Layout


class LowRankInputs:
    """Adds the low-rank products of adapted layers, and declares the inputs of the graph.

    Args:
        numbers: the adapted layers, with their places in `adapter_in` and `adapter_out`.
    """

    def __init__(self, g: GraphBuilder, numbers: Mapping[nn.Linear, int]) -> None:
        self._g, self._numbers = g, numbers
        rows = (adapter_section.LAYER_ROWS_IN, adapter_section.LAYER_ROWS_OUT)
        self._rows_in, self._rows_out = (g.declare_input(spec, Layout.DENSE) for spec in rows)
        widths = {w for layer in numbers for w in (layer.in_features, layer.out_features)}
        self._tables = {
            width: g.declare_input(adapter_section.table(width), Layout.DENSE)
            for width in sorted(widths)
        }

    def add(self, product: str, x: LinearInput, name: str, linear: nn.Linear) -> str:
        """Write the product of a layer, and what the adapter of each sequence adds to it."""
        if (number := self._numbers.get(linear)) is None:
            return product
        g, values = self._g, x.floats
        if x.offset is not None:
            values = g.op("Add", [values, g.weight(f"{name}.offset", x.offset)])
        place = g.weight(f"adapted_{number}", np.array(number, np.int64))
        a = self._matrices(self._rows_in, place, linear.in_features)  # [B, R, in]
        b = self._matrices(self._rows_out, place, linear.out_features)  # [B, R, out]
        low = g.op("FusedMatMul", [values, a], domain=FUSED, transB=1)  # [B, S, R]
        return g.op("Add", [product, g.op("MatMul", [low, b])])

    def _matrices(self, rows: str, place: str, width: int) -> str:
        numbers = self._g.op("Gather", [rows, place], axis=0)
        return self._g.op("Gather", [self._tables[width], numbers], axis=0)


class _Adapted(LinearOps):
    """Adds the low-rank products to those of another class. Only `matmul` may be adapted."""

    low_rank: LowRankInputs

    def prepare_input(self, x: str, name: str, least: float | None = None) -> LinearInput:
        """See `LinearOps`."""
        prepared = super().prepare_input(x, name, least)  # type: ignore[safe-super]
        return replace(prepared, floats=x)

    def matmul(self, x: LinearInput, name: str, linear: nn.Linear) -> str:
        """See `LinearOps`."""
        product = super().matmul(x, name, linear)  # type: ignore[safe-super]
        return self.low_rank.add(product, x, name, linear)


class AdaptedFp32(_Adapted, Fp32):
    """`Fp32` with adapters."""


class AdaptedInt8(_Adapted, Int8):
    """`Int8` with adapters: the integers of the base, and low-rank matrices in fp32."""
