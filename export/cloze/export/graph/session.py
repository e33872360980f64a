"""Opens a session of a graph during export: onnxruntime on a CPU or GPU, or a reference.

A CPU has no kernel for packed attention. The reference runs a packed graph without a GPU: ONNX's
own, and numpy versions of the fused operators. Sums are in fp32, and each result is rounded to the
operator's type, as onnxruntime's CUDA kernels do. Tests with the marker ``gpu`` compare the
operators with those kernels.
"""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from cloze.export.errors import ExportError
from cloze.export.graph.builder import FUSED
from cloze.model_store.error_lines import first_line
from cloze.model_store.installation import install_command
from cloze.model_store.layouts import Layout
from cloze.model_store.processor import cuda_settings, int8_instructions, int8_settings

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class Session(Protocol):
    """Runs one graph."""

    def run(
        self, output_names: Sequence[str], feeds: dict[str, NDArray[Any]]
    ) -> list[NDArray[Any]]:
        """Return the named outputs, in order."""


def open_session(file: Path, layout: Layout, *, cuda: bool = False) -> Session:
    """Open a session of a graph.

    A dense graph runs on the CPU. A packed graph runs on CUDA if requested, else in the reference.

    Raises:
        ExportError: CUDA was requested but is not available.
    """
    packed = layout is Layout.PACKED
    if packed and not cuda:
        return ReferenceSession(file)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if packed:
        return _on_cuda(file, options)
    for setting, value in int8_settings(int8_instructions()).items():
        options.add_session_config_entry(setting, value)
    session: Session = ort.InferenceSession(file, options, providers=[CPU])
    return session


def _on_cuda(file: Path, options: ort.SessionOptions) -> Session:
    if CUDA not in ort.get_available_providers():
        raise ExportError(
            "CUDA was asked for, but this onnxruntime has no CUDA provider; uninstall onnxruntime, "
            f"then: {install_command('gpu')}"
        )
    with redirect_stdout(sys.stderr):  # preload_dlls prints the missing libraries
        ort.preload_dlls()
    options.enable_mem_pattern = False
    try:
        session: Session = ort.InferenceSession(
            file, options, providers=[(CUDA, cuda_settings())], enable_fallback=0
        )
    except Exception as error:  # the runtime's errors have no common type
        raise ExportError(f"CUDA did not start, or lacks a kernel: {first_line(error)}") from error
    return session


# ---- the reference ------------------------------------------------------------------------------

Array = NDArray[Any]


class MatMul(OpRun):
    """``a @ b`` with sums in fp32; numpy sums fp16 in fp16."""

    op_domain = ""

    def _run(self, a: Array, b: Array) -> tuple[Array]:
        return ((a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype),)


class PackedMultiHeadAttention(OpRun):
    """Attention within each sequence.

    ``query``, ``key``, ``value`` [T, H] and ``cu_seqlens`` [B + 1] -> [T, H].
    """

    op_domain = FUSED

    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None,
        token_offset: Array,
        cu_seqlens: Array,
        *,
        num_heads: int,
    ) -> tuple[Array]:
        assert bias is None
        _check_token_offset(token_offset, cu_seqlens)
        result = np.empty_like(query)
        for begin, end in pairwise(cu_seqlens):
            q, k, v = (
                x[begin:end].astype(np.float32).reshape(end - begin, num_heads, -1).swapaxes(0, 1)
                for x in (query, key, value)
            )
            scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])  # [N, S, S]
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            context = weights @ v / weights.sum(-1, keepdims=True)
            result[begin:end] = context.swapaxes(0, 1).reshape(end - begin, -1)
        return (result,)


def _check_token_offset(token_offset: Array, cu_seqlens: Array) -> None:
    """Check that ``token_offset`` lists the cells of the tokens in order, then the other cells."""
    longest = token_offset.shape[1]
    cells = np.concatenate(
        [row * longest + np.arange(length) for row, length in enumerate(np.diff(cu_seqlens))]
    )
    first_cells = token_offset.ravel()[: len(cells)]
    if token_offset.shape[0] != len(cu_seqlens) - 1 or not np.array_equal(first_cells, cells):
        raise ValueError("token_offset does not match cu_seqlens")
    if not np.array_equal(np.sort(token_offset.ravel()), np.arange(token_offset.size)):
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
    """``gelu(x + bias)``, approximated with tanh."""

    op_domain = FUSED

    def _run(self, x: Array, bias: Array) -> tuple[Array]:
        return (_gelu(x, bias, "tanh"),)


class QuickGelu(OpRun):
    """``x * sigmoid(alpha * x)``."""

    op_domain = FUSED

    def _run(self, x: Array, *, alpha: float) -> tuple[Array]:
        wide = x.astype(np.float32)
        return ((wide / (1 + np.exp(-alpha * wide))).astype(x.dtype),)


class RotaryEmbedding(OpRun):
    """Rotary positions of ``x`` [B, S, H], by halves (Su et al. 2021, section 3.2)."""

    op_domain = FUSED

    def _run(
        self,
        x: Array,
        position_ids: Array,
        cos: Array,
        sin: Array,
        *,
        num_heads: int,
        rotary_embedding_dim: int,
        interleaved: int = 0,
    ) -> tuple[Array]:
        assert not interleaved
        heads = x.astype(np.float32).reshape(*x.shape[:2], num_heads, -1)
        half = rotary_embedding_dim // 2
        one, other = heads[..., :half], heads[..., half : 2 * half]
        c, s = (table[position_ids].astype(np.float32)[:, :, None] for table in (cos, sin))
        turned = [one * c - other * s, other * c + one * s, heads[..., 2 * half :]]
        return (np.concatenate(turned, -1).reshape(x.shape).astype(x.dtype),)


def _gelu(x: Array, bias: Array, approximate: str) -> Array:
    # The kernel computes the sum in the type of its terms.
    total = torch.from_numpy((x + bias).astype(np.float32))
    result: Array = torch.nn.functional.gelu(total, approximate=approximate).numpy().astype(x.dtype)
    return result


class ReferenceSession:
    """Runs a packed graph with the interface of an onnxruntime session."""

    def __init__(self, file: Path) -> None:
        operators = [
            MatMul,
            PackedMultiHeadAttention,
            SkipLayerNormalization,
            RotaryEmbedding,
            BiasGelu,
            FastGelu,
            QuickGelu,
        ]
        self._evaluator = ReferenceEvaluator(onnx.load(file), new_ops=operators)

    def run(self, output_names: Sequence[str], feeds: dict[str, Array]) -> list[Array]:
        """Return the named outputs, like `onnxruntime.InferenceSession.run`."""
        return list(self._evaluator.run(list(output_names), feeds))
