"""What a packed graph means, computed without a GPU: ONNX's own reference, and ours of the fused operators, in numpy.

No kernel for packed attention runs on a CPU. Sums are in fp32 and each operator's result is rounded to its type, as the kernels
of onnxruntime do it on CUDA, where alone this can be compared with them (marker ``gpu``).
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from export.graph.builder import FUSED

Array = NDArray[Any]


class MatMul(OpRun):
    """``a @ b``; numpy alone would sum halves in halves."""

    op_domain = ""

    def _run(self, a: Array, b: Array) -> tuple[Array]:
        return ((a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype),)


class PackedMultiHeadAttention(OpRun):
    """Attention within each sequence: ``query``, ``key``, ``value`` [T, H] and ``cu_seqlens`` [B + 1] -> [T, H]."""

    op_domain = FUSED

    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None,
        offset: Array,
        starts: Array,
        *,
        num_heads: int,
    ) -> tuple[Array]:
        assert bias is None
        _check_offset(offset, starts)
        result = np.empty_like(query)
        for begin, end in pairwise(starts):
            q, k, v = (
                x[begin:end].astype(np.float32).reshape(end - begin, num_heads, -1).swapaxes(0, 1)
                for x in (query, key, value)
            )
            scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])  # [N, S, S]
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            context = weights @ v / weights.sum(-1, keepdims=True)
            result[begin:end] = context.swapaxes(0, 1).reshape(end - begin, -1)
        return (result,)


def _check_offset(offset: Array, starts: Array) -> None:
    """The first cells of ``token_offset`` are those of the tokens, in order, the rest of it the others."""
    longest = offset.shape[1]
    cells = np.concatenate(
        [row * longest + np.arange(length) for row, length in enumerate(np.diff(starts))]
    )
    if offset.shape[0] != len(starts) - 1 or not np.array_equal(
        offset.ravel()[: len(cells)], cells
    ):
        raise ValueError("token_offset does not say where the tokens of cu_seqlens lie")
    if not np.array_equal(np.sort(offset.ravel()), np.arange(offset.size)):
        raise ValueError("token_offset does not name every cell once")


class SkipLayerNormalization(OpRun):
    """``LayerNorm(x + skip + bias)``."""

    op_domain = FUSED

    def _run(
        self,
        x: Array,
        skip: Array,
        scale: Array,
        shift: Array,
        bias: Array | None = None,
        *,
        epsilon: float,
    ) -> tuple[Array]:
        total = x.astype(np.float32) + skip
        if bias is not None:
            total += bias
        centred = total - total.mean(-1, keepdims=True)
        variance = np.square(centred).mean(-1, keepdims=True)
        normal = centred / np.sqrt(variance + epsilon)
        return ((normal * scale + shift).astype(x.dtype),)


class BiasGelu(OpRun):
    """``gelu(x + bias)``, exact (Hendrycks & Gimpel 2016)."""

    op_domain = FUSED

    def _run(self, x: Array, bias: Array) -> tuple[Array]:
        return (_gelu(x, bias, "none"),)


class FastGelu(OpRun):
    """``gelu(x + bias)`` by tanh."""

    op_domain = FUSED

    def _run(self, x: Array, bias: Array) -> tuple[Array]:
        return (_gelu(x, bias, "tanh"),)


def _gelu(x: Array, bias: Array, approximate: str) -> Array:
    total = torch.from_numpy(
        (x + bias).astype(np.float32)
    )  # the sum in the type of its terms, as the kernel forms it
    result: Array = torch.nn.functional.gelu(total, approximate=approximate).numpy().astype(x.dtype)
    return result


class ReferenceSession:
    """A packed graph's meaning, with the face of a runtime's session.

    Args:
        file: the graph, its weights beside it.
    """

    def __init__(self, file: Path) -> None:
        operators = [MatMul, PackedMultiHeadAttention, SkipLayerNormalization, BiasGelu, FastGelu]
        self._evaluator = ReferenceEvaluator(onnx.load(file), new_ops=operators)

    def run(self, wanted: Sequence[str], feeds: dict[str, Array]) -> list[Array]:
        """As `onnxruntime.InferenceSession.run`."""
        return list(self._evaluator.run(list(wanted), feeds))
