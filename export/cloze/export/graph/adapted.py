"""Matrix products to which low-rank matrices of adapters are added, one adapter per sequence.

The products of the base stay as they are, in fp32 or int8. What is added is fp32:

    x W^T + (x A^T) B^T

Each sequence has its own A [R, in] and B^T [R, out], gathered from tables of rows
(`cloze.model_store.adapter_section`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from onnx import TensorProto
from torch import nn

from cloze.export.graph.builder import FUSED, GraphBuilder
from cloze.export.graph.linear_ops import LARGEST_INT8, InputScale, Int8, LinearInput, LinearOps
from cloze.model_store import adapter_section
from cloze.model_store.layouts import Layout


class LowRankInputs:
    """Adds the low-rank products of adapted layers, and declares the inputs of the graph.

    Layers with the same input have one product with their A.

    Args:
        layers: the adapted layers, in the order of `adapter_in` and `adapter_out`.
        groups: all layers; those of a group have the same input.
    """

    def __init__(
        self, g: GraphBuilder, layers: Collection[nn.Linear], groups: Sequence[Sequence[nn.Linear]]
    ) -> None:
        self._g = g
        self._rows_in, self._rows_out = (
            dict(zip(layers, self._split(rows, len(layers)), strict=True))
            for rows in (
                g.declare_input(adapter_section.LAYER_ROWS_IN, Layout.DENSE),
                g.declare_input(adapter_section.LAYER_ROWS_OUT, Layout.DENSE),
            )
        )
        widths = {w for layer in layers for w in (layer.in_features, layer.out_features)}
        self._tables = {
            width: g.declare_input(adapter_section.table(width), Layout.DENSE)
            for width in sorted(widths)
        }
        self._groups = {
            layer: [other for other in group if other in layers]
            for group in groups
            for layer in group
        }
        self._low: dict[tuple[str, nn.Linear], str] = {}

    def add(self, product: str, x: LinearInput, name: str, linear: nn.Linear) -> str:
        """Write the product of a layer, and what the adapter of each sequence adds to it."""
        if linear not in self._rows_in:
            return product
        g = self._g
        if (x.floats, linear) not in self._low:
            self._multiply_in(x, name, self._groups[linear])
        b = self._matrices(linear.out_features, self._rows_out[linear])  # [B, R, out]
        return g.op("Add", [product, g.op("MatMul", [self._low[x.floats, linear], b])])

    def _multiply_in(self, x: LinearInput, name: str, layers: Sequence[nn.Linear]) -> None:
        """Write ``x A^T`` [B, S, R] of each of these layers, whose input is x [B, S, in]."""
        g, values = self._g, x.floats
        if x.offset is not None:
            values = g.op("Add", [values, g.weight(f"{name}.offset", x.offset)])
        rows = [self._rows_in[layer] for layer in layers]
        together = g.op("Concat", rows, axis=1) if len(rows) > 1 else rows[0]  # [B, n R]
        a = self._matrices(layers[0].in_features, together)
        low = g.op("FusedMatMul", [values, a], domain=FUSED, transB=1)
        places = [(x.floats, layer) for layer in layers]
        self._low |= zip(places, self._split(low, len(layers)), strict=True)

    def _matrices(self, width: int, rows: str) -> str:
        return self._g.op("Gather", [self._tables[width], rows], axis=0)

    def _split(self, value: str, count: int) -> list[str]:
        """Write the equal parts of a value along its last axis."""
        if count == 1:
            return [value]
        first = self._g.op("Split", [value], outputs=count, axis=-1, num_outputs=count)
        return [first, *(f"{first}_{number}" for number in range(1, count))]


class AdaptedFp32(LinearOps):
    """Adds the low-rank products to those of another class. Only `matmul` may be adapted."""

    low_rank: LowRankInputs

    def prepare_input(
        self, x: str, name: str, width: int, least: float | None = None
    ) -> LinearInput:
        """See `LinearOps`."""
        prepared = super().prepare_input(x, name, width, least)
        return replace(prepared, floats=x)

    def matmul(self, x: LinearInput, name: str, linear: nn.Linear, bias: str = "") -> str:
        """See `LinearOps`."""
        product = super().matmul(x, name, linear, bias)
        return self.low_rank.add(product, x, name, linear)


class AdaptedInt8(AdaptedFp32, Int8):
    """`Int8` with adapters: the integers of the base, and low-rank matrices in fp32.

    The fixed step of attention's output is that of the base. An adapter of the values may make the
    output larger than 127 of these steps, and integers that are cut off lose its results. The step
    of such a token is larger by a ratio. The ratio is 1 for a sequence without low-rank matrices,
    which so has the bits of the plain graph.
    """

    def __init__(
        self, g: GraphBuilder, scales: Mapping[str, InputScale], *, integers: bool = False
    ) -> None:
        super().__init__(g, scales, integers=integers)
        self._ratios: dict[str, str] = {}
        self._is_adapted = ""

    def prepare_input(
        self, x: str, name: str, width: int, least: float | None = None
    ) -> LinearInput:
        """See `LinearOps`."""
        scale = self._scales.get(name)
        if scale is None or scale.factors is not None:  # LayerNorm bounds smoothed inputs
            return super().prepare_input(x, name, width, least)
        ratio = self._write_ratio(x, scale.step)
        prepared = super().prepare_input(self.g.op("Div", [x, ratio]), name, width, least)
        self._ratios[prepared.value] = ratio
        return replace(prepared, floats=x)

    def _write_ratio(self, x: str, step: float) -> str:
        """Write how many times the fixed step the step of each token is: [B, S, 1], at least 1."""
        g = self.g
        one, axis = g.number(1.0), g.ints(-1)
        if not self._is_adapted:
            rows = g.op("Cast", [adapter_section.LAYER_ROWS_IN.name], to=TensorProto.FLOAT)
            total = g.op("ReduceSum", [rows, axis], keepdims=1)  # [B, 1]; row 0 means none
            some = g.op("Greater", [total, g.number(0.0)])
            self._is_adapted = g.op("Unsqueeze", [some, axis])  # [B, 1, 1]
        largest = g.op("ReduceMax", [g.op("Abs", [x]), axis], keepdims=1)
        ratio = g.op("Max", [g.op("Div", [largest, g.number(step * LARGEST_INT8)]), one])
        return g.op("Where", [self._is_adapted, ratio, one])

    def adds_bias(self, x: LinearInput) -> bool:
        """See `LinearOps`. A ratio multiplies the product afterwards."""
        return super().adds_bias(x) and x.value not in self._ratios

    def _multiply(self, x: LinearInput, integers: str, steps: str, bias: str = "") -> str:
        product = super()._multiply(x, integers, steps, bias)
        ratio = self._ratios.get(x.value)
        return product if ratio is None else self.g.op("Mul", [product, ratio])
