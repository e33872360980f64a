"""Opens a session of a graph during export: onnxruntime on a CPU or GPU, or a reference.

A CPU has no kernel for packed attention. The reference runs a packed graph without a GPU: ONNX's
own, and numpy versions of the fused operators. Sums are in fp32, and each result is rounded to the
operator's type, as onnxruntime's CUDA kernels do. Tests with the marker ``gpu`` compare the
operators with those kernels.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import onnx
import onnxruntime as ort
import torch
import torch.nn.functional as F
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


def _attend_packed(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    token_offset: Array,
    cu_seqlens: Array,
    *,
    num_heads: int,
) -> Array:
    """Attend within each sequence: ``query``, ``key``, ``value`` [T, H], ``cu_seqlens`` [B + 1]."""
    assert bias is None
    _check_token_offset(token_offset, cu_seqlens)
    result = np.empty_like(query, np.float32)
    for begin, end in pairwise(cu_seqlens):
        q, k, v = (
            torch.from_numpy(x[begin:end].astype(np.float32))
            .view(end - begin, num_heads, -1)
            .transpose(0, 1)
            for x in (query, key, value)
        )
        context = F.scaled_dot_product_attention(q, k, v)
        result[begin:end] = context.transpose(0, 1).flatten(1)
    return result


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


def _skip_norm(
    x: Array, skip: Array, scale: Array, shift: Array, bias: Array | float = 0.0, *, epsilon: float
) -> Array:
    total = x.astype(np.float32) + skip + bias
    centred = total - total.mean(-1, keepdims=True)
    variance = np.square(centred).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + epsilon) * scale + shift  # type: ignore[no-any-return]


def _gelu(x: Array, bias: Array, approximate: str = "none") -> Array:
    # The kernel computes the sum in the type of its terms.
    total = torch.from_numpy((x + bias).astype(np.float32))
    return F.gelu(total, approximate=approximate).numpy()


def _quick_gelu(x: Array, *, alpha: float) -> Array:
    wide = x.astype(np.float32)
    return wide / (1 + np.exp(-alpha * wide))  # type: ignore[no-any-return]


def _rotate(
    x: Array,
    position_ids: Array,
    cos: Array,
    sin: Array,
    *,
    num_heads: int,
    rotary_embedding_dim: int,
    interleaved: int = 0,
) -> Array:
    """Turn ``x`` [B, S, H] by its positions, by halves (Su et al. 2021, section 3.2)."""
    assert not interleaved
    heads = x.astype(np.float32).reshape(*x.shape[:2], num_heads, -1)
    half = rotary_embedding_dim // 2
    one, other = heads[..., :half], heads[..., half : 2 * half]
    c, s = (table[position_ids].astype(np.float32)[:, :, None] for table in (cos, sin))
    turned = [one * c - other * s, other * c + one * s, heads[..., 2 * half :]]
    return np.concatenate(turned, -1).reshape(x.shape)


def _lstm(x: Array, weights: Array, states: Array, bias: Array, lengths: Array, **_: Any) -> Array:
    """Return the states [w, 2, e, D] of a bidirectional LSTM; ONNX's own ignores the lengths."""
    size = states.shape[2]
    output = np.zeros((len(x), 2, x.shape[1], size))
    for text, way in np.ndindex(x.shape[1], 2):
        hidden = cell = np.zeros(size)
        for word in range(lengths[text])[:: -1 if way else 1]:
            gates = weights[way] @ x[word, text] + states[way] @ hidden
            gates = np.split(gates + bias[way].reshape(2, -1).sum(0), 4)
            into, out, keep = (1 / (1 + np.exp(-gate)) for gate in gates[:3])
            cell = keep * cell + into * np.tanh(gates[3])
            hidden = out * np.tanh(cell)
            output[word, way, text] = hidden
    return output


_OPERATORS: Final[Mapping[tuple[str, str], Callable[..., Array]]] = {
    ("", "LSTM"): _lstm,
    ("", "MatMul"): lambda a, b: a.astype(np.float32) @ b.astype(np.float32),
    (FUSED, "PackedMultiHeadAttention"): _attend_packed,
    (FUSED, "SkipLayerNormalization"): _skip_norm,
    (FUSED, "RotaryEmbedding"): _rotate,
    (FUSED, "BiasGelu"): _gelu,
    (FUSED, "FastGelu"): partial(_gelu, approximate="tanh"),
    (FUSED, "QuickGelu"): _quick_gelu,
}
"""Domain and name of an operator -> the operator in fp32."""


def _operator(domain: str, name: str, compute: Callable[..., Array]) -> type[OpRun]:
    """Return a class of ONNX's reference; the result has the type of the first input."""

    def run(_: OpRun, x: Array, *inputs: Array | None, **attributes: Any) -> tuple[Array]:
        return (compute(x, *inputs, **attributes).astype(x.dtype),)

    return type(name, (OpRun,), {"op_domain": domain, "_run": run})


class ReferenceSession:
    """Runs a packed graph with the interface of an onnxruntime session."""

    def __init__(self, file: Path) -> None:
        operators = [_operator(*names, compute) for names, compute in _OPERATORS.items()]
        self._evaluator = ReferenceEvaluator(onnx.load(file), new_ops=operators)

    def run(self, output_names: Sequence[str], feeds: dict[str, Array]) -> list[Array]:
        """Return the named outputs, like `onnxruntime.InferenceSession.run`."""
        return list(self._evaluator.run(list(output_names), feeds))
