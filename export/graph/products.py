"""How a product of activations and weights is computed: in fp32, in int8, or in fp16.

With int8 everything else of a graph is fp32. With fp16 the whole trunk is fp16; what leaves it is widened first, so that the
heads are the same.

int8: weights have a scale an output channel, activations a scale a token, so that a token's result does not depend on its
batch. With ``s`` the largest absolute value of a row of x over 127, and w' the weights in integers of step ``t``:

    x @ W^T  ~  s * (round(x / s) @ w'^T) * t

The sums are exact (int32), so a row alone and the same row in any batch give the same bits up to the order of fp32 around it.

How matrices lie on disk is another choice: kept as these integers they serve both precisions, fp32 widening them when a graph is
opened. They then stand for slightly other numbers than the checkpoint's (`round_to_integers`).

Source: Dettmers et al. 2022, "LLM.int8()", section 2.1 (vector-wise quantisation).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from export.errors import ExportError
from export.graph.builder import FUSED, GraphBuilder
from export.models.encoder import Encoder, Layer

_LARGEST = 127
"""Integers to either side of zero."""

_SMALLEST_STEP = 1e-12
"""So that a row of zeros divides by something."""

_AXIS_1 = np.array([1], np.int64)

WORDS = "embeddings.word"
"""The table that may lie on disk as integers."""

_ZERO = 128
"""What stands for zero in activations: the fast kernel takes u8 x s8."""


@dataclass(frozen=True, slots=True)
class LinearInput:
    """The left side of linear_ops.

    Attributes:
        value: [..., in], float32 or, quantised, uint8.
        step: [..., 1] float32, what one integer is worth; empty where the value is float32.
    """

    value: str
    step: str = ""


class LinearOps(Protocol):
    """How products are computed. ``name`` is of the weight, and of the place in the model where it stands."""

    def operand(self, g: GraphBuilder, x: str, name: str) -> LinearInput:
        """Make ``x`` [..., in] the left side of one or more products, the first of them by the weight ``name``."""

    def product(self, g: GraphBuilder, operand: LinearInput, name: str, linear: nn.Linear) -> str:
        """``x @ W^T`` without the bias: [..., in] -> [..., out] float32."""

    def vector(self, g: GraphBuilder, name: str, values: Tensor) -> str:
        """A bias, or a norm's scale, as the trunk's activations are."""

    def table(self, g: GraphBuilder, name: str, weight: Tensor) -> str:
        """A matrix whose rows are looked up: [V, H], as the trunk's activations are."""

    def widened(self, g: GraphBuilder, rows: str) -> str:
        """Rows of the trunk's activations in float32."""

    def scores(self, g: GraphBuilder, x: str, table: str, weight: Tensor, bias: str) -> str:
        """``x @ table^T + bias``: [..., H] -> [..., V] float32. ``weight`` is the table's, ``bias`` a value [V]."""


class _Matrices:
    """Matrices as they lie on disk.

    Args:
        smoothing: by name of the first weight that an operand meets: [in] float32, by which it is divided and the weights
            multiplied (`export.smoothing`); an operand without one is quantised as it is.
        integers: keep matrices as integers, for both precisions.
    """

    def __init__(self, smoothing: Mapping[str, Tensor], *, integers: bool) -> None:
        self._smoothing, self._keep_integers = smoothing, integers
        self._smoothed: dict[
            str, str
        ] = {}  # the operand's value -> the name that its smoothing has
        self._tables: dict[str, str] = {}

    def vector(self, g: GraphBuilder, name: str, values: Tensor) -> str:
        """See `LinearOps`."""
        return g.weight(name, values)

    def widened(self, g: GraphBuilder, rows: str) -> str:  # noqa: ARG002
        """See `LinearOps`."""
        return rows

    def table(self, g: GraphBuilder, name: str, weight: Tensor) -> str:
        """See `LinearOps`."""
        if not self._keep_integers:
            return g.weight(name, weight)
        if name not in self._tables:
            integers, steps = quantise(weight)
            rows = g.op("Cast", [g.weight(f"{name}.int8", integers)], to=TensorProto.FLOAT)
            column = g.op(
                "Unsqueeze", [g.weight(f"{name}.steps", steps), g.weight("axis_1", _AXIS_1)]
            )
            self._tables[name] = g.op("Mul", [rows, column])
        return self._tables[name]

    def _matrix(
        self, g: GraphBuilder, operand: LinearInput, name: str, weight: Tensor
    ) -> tuple[str, str]:
        """Names of the integers [in, out] and the steps [out] of a weight, smoothed as its operand is."""
        if operand.value in self._smoothed:
            weight = weight * self._smoothing[self._smoothed[operand.value]]
        integers, steps = quantise(weight)
        return g.weight(f"{name}.weight.int8", integers.t()), g.weight(
            f"{name}.weight.steps", steps
        )

    def _smooth(self, g: GraphBuilder, name: str) -> str:
        """The name of what an operand is multiplied by, [in]; empty if by nothing."""
        smooth = self._smoothing.get(name)
        return "" if smooth is None else g.weight(f"{name}.smoothing", smooth.reciprocal())


class Fp32(_Matrices):
    """LinearOps in fp32.

    Args:
        smoothing: None: matrices are kept as they are; else as the integers that `Int8` with this smoothing has.
    """

    def __init__(self, smoothing: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(smoothing or {}, integers=smoothing is not None)

    def operand(self, g: GraphBuilder, x: str, name: str) -> LinearInput:  # noqa: ARG002
        """See `LinearOps`."""
        if name in self._smoothing:
            self._smoothed[x] = name
        return LinearInput(x)

    def product(self, g: GraphBuilder, operand: LinearInput, name: str, linear: nn.Linear) -> str:
        """See `LinearOps`."""
        return g.op("MatMul", [operand.value, self._widened(g, operand, name, linear.weight)])

    def scores(self, g: GraphBuilder, x: str, table: str, weight: Tensor, bias: str) -> str:
        """See `LinearOps`. The product transposes, so that one weight serves it and the look-up."""
        return g.op("Gemm", [x, self.table(g, table, weight), bias], transB=1)

    def _widened(self, g: GraphBuilder, operand: LinearInput, name: str, weight: Tensor) -> str:
        """The matrix [in, out]; where integers are kept, from them, which the runtime folds when it opens the graph."""
        if not self._keep_integers:
            return g.weight(f"{name}.weight", weight.t())
        integers, steps = self._matrix(g, operand, name, weight)
        matrix = g.op("Mul", [g.op("Cast", [integers], to=TensorProto.FLOAT), steps])
        smooth = self._smooth(g, self._smoothed.get(operand.value, ""))
        return (
            g.op("Mul", [matrix, g.op("Unsqueeze", [smooth, g.weight("axis_1", _AXIS_1)])])
            if smooth
            else matrix
        )


class Fp16(Fp32):
    """LinearOps, and all else of the trunk, in fp16.

    Args:
        smoothing: as `Fp32` has it.
    """

    def vector(self, g: GraphBuilder, name: str, values: Tensor) -> str:
        """See `LinearOps`."""
        return g.weight(f"{name}.fp16", _halved(name, values))

    def widened(self, g: GraphBuilder, rows: str) -> str:
        """See `LinearOps`."""
        return g.op("Cast", [rows], to=TensorProto.FLOAT)

    def table(self, g: GraphBuilder, name: str, weight: Tensor) -> str:
        """See `LinearOps`."""
        if self._keep_integers and name == WORDS:
            return g.op("Cast", [super().table(g, name, weight)], to=TensorProto.FLOAT16)
        return g.weight(f"{name}.fp16", _halved(name, weight))

    def scores(self, g: GraphBuilder, x: str, table: str, weight: Tensor, bias: str) -> str:
        """See `LinearOps`. In fp32: of logits near 20, fp16 knows no more than two digits after the point."""
        whole = (
            super().table(g, table, weight)
            if self._keep_integers
            else self.widened(g, self.table(g, table, weight))
        )
        return g.op("Gemm", [x, whole, bias], transB=1)

    def _widened(self, g: GraphBuilder, operand: LinearInput, name: str, weight: Tensor) -> str:
        """The matrix [in, out] in fp16."""
        if self._keep_integers:
            return g.op(
                "Cast", [super()._widened(g, operand, name, weight)], to=TensorProto.FLOAT16
            )
        return g.weight(f"{name}.weight.fp16", _halved(name, weight).t())


def _halved(name: str, values: Tensor) -> Tensor:
    """The nearest fp16 numbers.

    Raises:
        ExportError: one is too large for fp16.
    """
    half = values.half()
    if not half.isfinite().all():
        raise ExportError(
            f"{name} holds {float(values.abs().max()):.3g}, which fp16 cannot; use fp32"
        )
    return half


class Int8(_Matrices):
    """LinearOps in int8.

    Args:
        smoothing: by name of the first weight that an operand meets: [in] float32, by which it is divided and the weights
            multiplied (`export.smoothing`); an operand without one is quantised as it is.
        integers: the word embeddings lie on disk as integers.
    """

    def __init__(self, smoothing: Mapping[str, Tensor], *, integers: bool = False) -> None:
        super().__init__(smoothing, integers=integers)

    def operand(self, g: GraphBuilder, x: str, name: str) -> LinearInput:
        """See `LinearOps`."""
        return self._quantised(g, x, name, g.weight("axis_last", np.array([-1], np.int64)))

    def _quantised(self, g: GraphBuilder, x: str, name: str, axis: str) -> LinearInput:
        smooth = self._smooth(g, name)
        if smooth:
            x = g.op("Mul", [x, smooth])
        largest = g.op("ReduceMax", [g.op("Abs", [x]), axis], keepdims=1)
        step = g.op("Div", [largest, g.weight("largest_integer", np.array(_LARGEST, np.float32))])
        step = g.op("Max", [step, g.weight("smallest_step", np.array(_SMALLEST_STEP, np.float32))])
        scaled = g.op("Div", [x, step])
        value = g.op(
            "QuantizeLinear",
            [
                scaled,
                g.weight("one", np.array(1, np.float32)),
                g.weight("zero_point", np.array(_ZERO, np.uint8)),
            ],
        )
        if smooth:
            self._smoothed[value] = name
        return LinearInput(value, step)

    def product(self, g: GraphBuilder, operand: LinearInput, name: str, linear: nn.Linear) -> str:
        """See `LinearOps`."""
        return self._multiply(g, operand, *self._matrix(g, operand, name, linear.weight))

    def scores(self, g: GraphBuilder, x: str, table: str, weight: Tensor, bias: str) -> str:
        """See `LinearOps`."""
        # Not -1: of zero rows, onnxruntime 1.31 reduces a negative axis to a wrong shape.
        operand = self._quantised(g, x, "", g.weight("axis_1", _AXIS_1))
        integers, steps = quantise(weight)
        if self._keep_integers:  # those of the table, turned when the graph is opened
            turned = g.op("Transpose", [g.weight(f"{table}.int8", integers)], perm=[1, 0])
        else:
            turned = g.weight(f"{table}.turned.int8", integers.t())
        return g.op(
            "Add", [self._multiply(g, operand, turned, g.weight(f"{table}.steps", steps)), bias]
        )

    def _multiply(self, g: GraphBuilder, operand: LinearInput, integers: str, steps: str) -> str:
        product = g.op(
            "MatMulIntegerToFloat",
            [
                operand.value,
                integers,
                g.weight("one", np.array(1, np.float32)),
                steps,
                g.weight("zero_point", np.array(_ZERO, np.uint8)),
            ],
            domain=FUSED,
        )
        return g.op("Mul", [product, operand.step])


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] float32 -> integers [out, in] int8 in -127..127, and steps [out] float32: ``weight ~ integers * steps``."""
    steps = (weight.abs().amax(1) / _LARGEST).clamp_min(_SMALLEST_STEP)
    return (weight / steps[:, None]).round().to(torch.int8), steps


@torch.no_grad()
def round_to_integers(encoder: Encoder, smoothing: Mapping[str, Tensor]) -> set[Tensor]:
    """Give a model's word embeddings and encoder, in place, the values that their integers stand for; returns those matrices."""
    rounded: set[Tensor] = set()
    for number, layer in enumerate(encoder.layers):
        assert isinstance(layer, Layer)
        for name, linears in layer.products().items():
            smooth = smoothing.get(f"layers.{number}.{name}")
            for linear in linears:
                linear.weight.copy_(
                    _rounded(linear.weight)
                    if smooth is None
                    else _rounded(linear.weight * smooth) / smooth
                )
                rounded.add(linear.weight)
    words = encoder.embeddings.word.weight
    words.copy_(_rounded(words))
    return rounded | {words}


def _rounded(weight: Tensor) -> Tensor:
    integers, steps = quantise(weight)
    return integers * steps[:, None]
