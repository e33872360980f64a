"""The arithmetic of matrix products in a graph: fp32, int8 or fp16.

- `LinearOps`: everything is fp32.
- `Int8`: matrix products are int8, everything else is fp32.
- `Fp16`: the whole trunk is fp16. The heads are fp32: the rows that a head reads are cast first.

int8 has one step ``t`` per output channel for weights. Activations have a step ``s`` that is fixed
(`InputScale`) or computed per token: the largest absolute value of a row of x divided by 127. The
result of a token therefore does not depend on its batch. With w' the weights as integers:

    x @ W^T  ~  s * (round(x / s) @ w'^T) * t

The sums are exact (int32). A row alone and the same row in any batch give the same bits, except
for the order of the surrounding fp32 operations.

The storage of matrices is a separate choice. Stored integers serve every precision: fp32 and fp16
graphs convert the integers to floats when a runtime opens the graph. The integers then stand for
slightly different numbers than the checkpoint's (`round_to_int8`).

Source: Dettmers et al. 2022, "LLM.int8()", section 2.1 (vector-wise quantisation).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from cloze.export.errors import ExportError
from cloze.export.graph.builder import FUSED, GraphBuilder
from cloze.model_store.tensors import WORD_TABLE

LARGEST_INT8 = 127
"""Quantised values are -127 to 127."""

_SMALLEST_STEP = 1e-12
"""A lower bound of steps: a row of zeros must not divide by zero."""

_ZERO_POINT = 128
"""The integer that stands for zero in activations: the fast kernel takes u8 x s8."""


@dataclass(frozen=True, slots=True)
class InputScale:
    """The fixed scale of the input of products: ``x ~ integers * step * factors``.

    Attributes:
        step: the size of one integer.
        factors: smoothing factors [in] float32. The input is divided by the factors, and its
            weights are multiplied. None for an input that is not smoothed.
    """

    step: float
    factors: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LinearInput:
    """The left operand of one or more matrix products.

    Attributes:
        value: name of a value [..., in], float32, float16 or, quantised, uint8.
        name: name of the first weight that the input meets.
        scale: the input's fixed scale; None: it has none.
        step: name of the size of one integer, float32: a value [..., 1] with a step per token, or
            a constant; empty if not quantised.
        floats: name of the value before it was quantised, for graphs with adapters; else empty.
        offset: [in], subtracted from the input, its product added to a bias; None: no offset.
    """

    value: str
    name: str = ""
    scale: InputScale | None = None
    step: str = ""
    floats: str = ""
    offset: Tensor | None = None


class LinearOps:
    """Writes matrix products and the constants around them, here in fp32.

    A ``name`` is the name of a weight and of its place in the model.

    Args:
        scales: the fixed scales of inputs, by the name of the first weight that an input meets
            (`cloze.export.check.rounding`).
        integers: store matrices as integers, for every precision.
    """

    def __init__(
        self,
        g: GraphBuilder,
        scales: Mapping[str, InputScale] | None = None,
        *,
        integers: bool = False,
    ) -> None:
        self.g = g
        self._scales, self._integers = scales or {}, integers
        self._word_table = ""
        self._rows: dict[str, LinearInput] = {}  # of heads, by the names of their floats

    def prepare_input(
        self,
        x: str,
        name: str,
        width: int,  # noqa: ARG002
        least: float | None = None,  # noqa: ARG002
    ) -> LinearInput:
        """Convert ``x`` [..., width] to the input of products, the first with the weight ``name``.

        Args:
            least: a lower bound of ``x``, at most 0; None if none is known.
        """
        return LinearInput(x, name, self._scales.get(name))

    def adds_bias(self, x: LinearInput) -> bool:  # noqa: ARG002
        """Return whether products of an input add a bias without a pass of their own."""
        return False

    def matmul(self, x: LinearInput, name: str, linear: nn.Linear, bias: str = "") -> str:
        """Write ``x @ W^T``: [..., in] -> [..., out].

        Args:
            bias: name of a vector [out] to add, only if `adds_bias`.
        """
        assert not bias
        return self.g.op("MatMul", [x.value, self._matrix(x, name, linear.weight)])

    def row_product(self, x: str, name: str, weight: Tensor, axis: int) -> str:  # noqa: ARG002
        """Write ``x @ weight^T`` of a head: [..., in] -> [..., out], both float32.

        Args:
            name: of the weight [out, in].
            axis: of ``in``; not -1 (see `Int8.tied_logits`).
        """
        return self.g.op("MatMul", [x, self.g.weight(name, weight.t())])

    def tied_logits(self, x: str, table: str, weight: Tensor, bias: str) -> str:
        """Write ``x @ table^T + bias``: [..., H] -> [..., V], both float32.

        The product transposes the table, so one stored table is enough.

        Args:
            table: name of the embedding table.
            weight: the table's values [V, H].
            bias: name of a value [V].
        """
        return self.g.op("Gemm", [x, self._table(table, weight), bias], transB=1)

    def vector(self, name: str, values: Tensor) -> str:
        """Add a bias or the scale of a norm, in the type of the trunk's activations."""
        return self.g.weight(name, values)

    def constant(self, name: str, values: Tensor) -> str:
        """Add numbers that are no weights, in the type of the trunk's activations."""
        return self.g.weight(name, values, exact=True)

    def biased(self, product: str, name: str, linear: nn.Linear) -> str:
        """Write the sum of a product and the bias of its layer, if the layer has one."""
        if linear.bias is None:
            return product
        return self.g.op("Add", [product, self.vector(f"{name}.bias", linear.bias)])

    def to_float32(self, rows: str) -> str:
        """Convert rows of the trunk's activations to float32."""
        return rows

    def look_up(self, name: str, weight: Tensor, ids: str) -> str:
        """Write the rows of a table [V, H] with these ids: [...] -> [..., H].

        The rows have the type of the trunk's activations.
        """
        return self.g.op("Gather", [self._table(name, weight), ids], axis=0)

    def _is_stored(self, table: str) -> bool:
        """Return whether a table is stored as integers, which only the words are."""
        return self._integers and table == WORD_TABLE

    def _stored_table(self, name: str, weight: Tensor) -> tuple[str, str]:
        """Add a table as integers [V, H] and steps [V]."""
        integers, steps = quantise(weight)
        return self.g.weight(f"{name}.int8", integers), self.g.weight(f"{name}.steps", steps)

    def _table(self, name: str, weight: Tensor) -> str:
        """Add a table [V, H] in float32; the runtime computes stored integers once, on opening."""
        if not self._is_stored(name):
            return self.g.weight(name, weight)
        if not self._word_table:
            self._word_table = self._to_floats(*self._stored_table(name, weight))
        return self._word_table

    def _to_floats(self, integers: str, steps: str) -> str:
        """Write ``integers * steps`` in float32: [..., H] and [...] -> [..., H]."""
        g = self.g
        column = g.op("Unsqueeze", [steps, g.ints(-1)])
        return g.op("Mul", [g.op("Cast", [integers], to=TensorProto.FLOAT), column])

    def _int8_matrix(self, x: LinearInput, name: str, weight: Tensor) -> tuple[str, str]:
        """Add a weight as integers [in, out] and steps [out], smoothed as its input is."""
        if x.scale is not None and x.scale.factors is not None:
            weight = weight * x.scale.factors
        integers, steps = quantise(weight)
        return (
            self.g.weight(f"{name}.weight.int8", integers.t()),
            self.g.weight(f"{name}.weight.steps", steps),
        )

    def _reciprocal_factors(self, x: LinearInput) -> str:
        """Add the numbers [in] that an input is multiplied by; return "" if it is not smoothed."""
        if x.scale is None or x.scale.factors is None:
            return ""
        return self.g.weight(f"{x.name}.smoothing", x.scale.factors.reciprocal())

    def _matrix(self, x: LinearInput, name: str, weight: Tensor) -> str:
        """Add a matrix [in, out]; the runtime computes stored integers once, on opening."""
        g = self.g
        if not self._integers:
            return g.weight(f"{name}.weight", weight.t())
        integers, steps = self._int8_matrix(x, name, weight)
        matrix = g.op("Mul", [g.op("Cast", [integers], to=TensorProto.FLOAT), steps])
        factors = self._reciprocal_factors(x)
        if not factors:
            return matrix
        return g.op("Mul", [matrix, g.op("Unsqueeze", [factors, g.ints(1)])])


class Fp16(LinearOps):
    """Products, and the rest of the trunk, in fp16."""

    def vector(self, name: str, values: Tensor) -> str:
        """See `LinearOps`."""
        return self.g.weight(f"{name}.fp16", to_fp16(name, values))

    def constant(self, name: str, values: Tensor) -> str:
        """See `LinearOps`."""
        return self.vector(name, values)

    def to_float32(self, rows: str) -> str:
        """See `LinearOps`."""
        return self.g.op("Cast", [rows], to=TensorProto.FLOAT)

    def look_up(self, name: str, weight: Tensor, ids: str) -> str:
        """See `LinearOps`."""
        if self._is_stored(name):
            table = self.g.op("Cast", [self._table(name, weight)], to=TensorProto.FLOAT16)
        else:
            table = self.vector(name, weight)
        return self.g.op("Gather", [table, ids], axis=0)

    def tied_logits(self, x: str, table: str, weight: Tensor, bias: str) -> str:
        """See `LinearOps`. In fp32: fp16 keeps only two decimals of logits near 20."""
        if self._integers:
            fp32_table = self._table(table, weight)
        else:
            fp32_table = self.to_float32(self.vector(table, weight))
        return self.g.op("Gemm", [x, fp32_table, bias], transB=1)

    def _matrix(self, x: LinearInput, name: str, weight: Tensor) -> str:
        """Add a matrix [in, out] in fp16."""
        if self._integers:
            return self.g.op("Cast", [super()._matrix(x, name, weight)], to=TensorProto.FLOAT16)
        return self.g.weight(f"{name}.weight.fp16", to_fp16(name, weight).t())


def to_fp16(name: str, values: Tensor) -> Tensor:
    """Round to the nearest fp16 numbers."""
    rounded = values.half()
    if not rounded.isfinite().all():
        raise ExportError(
            f"{name} holds {float(values.abs().max()):.3g}, which fp16 cannot; use fp32"
        )
    return rounded


class Int8(LinearOps):
    """Products in int8. An input without a scale has a step per token."""

    def prepare_input(
        self, x: str, name: str, width: int, least: float | None = None
    ) -> LinearInput:
        """See `LinearOps`."""
        g = self.g
        if (scale := self._scales.get(name)) is None:
            return self._quantise_tokens(x, width, -1, least)
        if factors := self._reciprocal_factors(LinearInput(x, name, scale)):
            x = g.op("Mul", [x, factors])
        step = g.weight(f"{name}.step", np.array(scale.step, np.float32))
        value = g.op("QuantizeLinear", [x, step, self._zero_point()])
        return LinearInput(value, name, scale, step)

    def adds_bias(self, x: LinearInput) -> bool:
        """See `LinearOps`."""
        return x.scale is not None

    def matmul(self, x: LinearInput, name: str, linear: nn.Linear, bias: str = "") -> str:
        """See `LinearOps`."""
        integers, steps = self._int8_matrix(x, name, linear.weight)
        return self._multiply(x, self.g.own(integers), steps, bias)

    def look_up(self, name: str, weight: Tensor, ids: str) -> str:
        """See `LinearOps`. Only the rows become floats, so no table of floats is in memory."""
        if not self._is_stored(name):
            return super().look_up(name, weight, ids)
        integers, steps = self._stored_table(name, weight)
        rows = self.g.op("Gather", [integers, ids], axis=0)
        return self._to_floats(rows, self.g.op("Gather", [steps, ids], axis=0))

    def tied_logits(self, x: str, table: str, weight: Tensor, bias: str) -> str:
        """See `LinearOps`."""
        g = self.g
        # Not axis -1: onnxruntime 1.31 reduces a negative axis of zero rows to a wrong shape.
        rows = self._quantise_tokens(x, weight.shape[1], 1)
        integers, steps = quantise(weight)
        if self._integers:  # the table's integers, which the runtime transposes once, on opening
            stored = g.own(g.weight(f"{table}.int8", integers))
            transposed = g.op("Transpose", [stored], perm=[1, 0])
        else:
            transposed = g.own(g.weight(f"{table}.turned.int8", integers.t()))
        logits = self._multiply(rows, transposed, g.weight(f"{table}.steps", steps))
        return g.op("Add", [logits, bias])

    def row_product(self, x: str, name: str, weight: Tensor, axis: int) -> str:
        """See `LinearOps`. In fp32 if matrices are stored as integers: those of heads are not."""
        if self._integers:
            return super().row_product(x, name, weight, axis)
        if x not in self._rows:
            self._rows[x] = self._quantise_tokens(x, weight.shape[1], axis)
        integers, steps = quantise(weight)
        stored = self.g.own(self.g.weight(f"{name}.int8", integers.t()))
        return self._multiply(self._rows[x], stored, self.g.weight(f"{name}.steps", steps))

    def _quantise_tokens(
        self, x: str, width: int, axis: int, least: float | None = None
    ) -> LinearInput:
        """Quantise each token [width] along an axis with a step of its own, as one block."""
        g = self.g
        if least is None:
            largest = g.op("ReduceMax", [g.op("Abs", [x]), g.ints(axis)], keepdims=1)
            smallest = g.number(_SMALLEST_STEP)
        else:  # a pass over x less: its largest number is its largest absolute number, or -least is
            largest = g.op("ReduceMax", [x, g.ints(axis)], keepdims=1)
            smallest = g.number(max(-least / LARGEST_INT8, _SMALLEST_STEP))
        step = g.op("Max", [g.op("Div", [largest, g.number(float(LARGEST_INT8))]), smallest])
        zeros = g.op("Expand", [self._zero_point(), g.op("Shape", [step])])
        value = g.op("QuantizeLinear", [x, step, zeros], axis=axis, block_size=width)
        return LinearInput(value, step=step)

    def _multiply(self, x: LinearInput, integers: str, steps: str, bias: str = "") -> str:
        fixed = x.scale is not None
        step = x.step if fixed else self.g.number(1.0)
        inputs = [x.value, integers, step, steps, self._zero_point()]
        if bias:
            inputs += ["", bias]
        product = self.g.op("MatMulIntegerToFloat", inputs, domain=FUSED)
        return product if fixed else self.g.op("Mul", [product, x.step])

    def _zero_point(self) -> str:
        return self.g.weight("zero_point", np.array(_ZERO_POINT, np.uint8))


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in] as int8 integers, -127 to 127, and float32 steps [out]."""
    steps = (weight.abs().amax(1) / LARGEST_INT8).clamp_min(_SMALLEST_STEP)
    return (weight / steps[:, None]).round().to(torch.int8), steps
