"""The graph to which blocks write: one precision, and one layout of batches."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from cloze.export.graph.builder import FUSED, layer_norm
from cloze.export.graph.linear_ops import LinearOps
from cloze.model_store import tensors
from cloze.model_store.layouts import Layout
from cloze.model_store.tensors import TensorSpec

T = TypeVar("T")


class TrunkGraph:
    """The unfinished graph of a trunk in the dense layout: all sequences have one length.

    Hidden states are [B, S, H]. Without padding no mask is needed, and the flash kernel of a CPU
    runs.

    Attributes:
        keys: name of the number of each sequence's first tokens to which tokens attend, int32 [B];
            "": they attend to all tokens.
        is_last: whether the layer that is written next is the last one.
        rows: the new row numbers of the inputs of `keep_rows`, by their names.
    """

    layout: ClassVar[Layout] = Layout.DENSE

    def __init__(self, linear_ops: LinearOps) -> None:
        self.linear_ops, self.g = linear_ops, linear_ops.g
        self.keys, self.is_last = "", False
        self.rows: dict[str, str] = {}
        self._kept = ""
        self._written: dict[str, Any] = {}

    def once(self, key: str, write: Callable[[], T]) -> T:
        """Return what ``write`` returned at the first call with this key: layers share it."""
        if key not in self._written:
            self._written[key] = write()
        return self._written[key]  # type: ignore[no-any-return]

    def declare(self, tensor: TensorSpec) -> str:
        """Declare an input of the graph."""
        return self.g.declare_input(tensor, self.layout)

    def keep_rows(self, inputs: Sequence[TensorSpec]) -> None:
        """Declare row numbers of [T, H]; the last layer computes only these, and the first row.

        Without the first row, a batch without requests would have no row at all.
        """
        g = self.g
        first = one = g.number(1)
        flat = [g.weight("first_row", np.zeros(1, np.int32))]
        for tensor in inputs:
            flat.append(g.op("Reshape", [self.declare(tensor), g.ints(-1)]))
            end = g.op("Add", [first, g.op("Size", [tensor.name])])
            rows, shape = g.op("Range", [first, end, one]), g.op("Shape", [tensor.name])
            self.rows[tensor.name] = g.op("Reshape", [rows, shape], allowzero=1)
            first = end
        self._kept = g.op("Concat", flat, axis=0)

    def kept(self, x: str) -> str:
        """Write the rows of ``x`` that heads read, [R, H]; ``x`` itself before the last layer."""
        if not (self.is_last and self._kept):
            return x
        return self.g.op("Gather", [self.g.op("Flatten", [x], axis=-1), self._kept], axis=0)

    def attended(self) -> str:
        """Write which tokens others attend to, bool [B, S] of the dense layout; "": all tokens."""
        if not self.keys:
            return ""
        g = self.g
        tokens = g.op("Squeeze", [g.op("Shape", [tensors.INPUT_IDS.name], start=1)])
        keys = g.op("Cast", [self.keys], to=TensorProto.INT64)
        column = g.op("Unsqueeze", [keys, g.ints(1)])
        return g.op("Less", [g.op("Range", [g.number(0), tokens, g.number(1)]), column])

    def positions(self, table: Tensor) -> str:
        """Write the row of each token's position in a table [P, H]."""
        g = self.g
        rows = g.weight(tensors.POSITION_TABLE, table)
        return g.op("Slice", [rows, g.ints(0), g.op("Shape", [tensors.INPUT_IDS.name], start=1)])

    def norm(self, x: str, name: str, norm: nn.LayerNorm) -> str:
        """Write ``LayerNorm(x)``."""
        return layer_norm(self.g, x, name, norm)

    def norm_of_sum(self, terms: Sequence[str], name: str, norm: nn.LayerNorm) -> str:
        """Write ``LayerNorm`` of the sum of one or more terms."""
        total = self.g.op("Sum", terms) if len(terms) > 1 else terms[0]
        return layer_norm(self.g, total, name, norm)

    def rotate(self, x: str, tables: Sequence[str], **sizes: int) -> str:
        """Write the rotation of queries or keys by their positions.

        Args:
            tables: names of the cosines and the sines [P, d / 2]; a position beyond them is an
                error of the runtime.
            sizes: the attributes of ``RotaryEmbedding``.
        """
        inputs = [x, self.g.ints(0), *tables]
        return self.g.op("RotaryEmbedding", inputs, domain=FUSED, **sizes)

    def attend(
        self, operands: tuple[str, str, str], heads: int, bias: str = "", scale: float | None = None
    ) -> str:
        """Write the attention of each sequence to itself.

        Sequences of 32 to 300 tokens take 1.1 to 1.3 times as long with `keys` as without, because
        the flash kernel takes no mask (12 heads of 64, one thread).

        With a bias, ONNX's ``Attention`` is faster, which adds bias and softmax head by head.
        One layer of 8 x 128 tokens, 12 heads of 32, one thread: 2.4 and 3.3 ms. It takes no `keys`.

        Args:
            operands: names of queries, keys and values.
            heads: N, the number of attention heads.
            bias: name of what is added to the scores [1 or B, N, S, S]; "": nothing is added.
            scale: the factor of the products of queries and keys; None: that of the paper.
        """
        scaled: dict[str, Any] = {} if scale is None else {"scale": scale}
        if bias and not self.keys:
            inputs = [*operands, bias]
            return self.g.op("Attention", inputs, q_num_heads=heads, kv_num_heads=heads, **scaled)
        inputs = [*operands, "", self.keys, bias]
        while not inputs[-1]:
            inputs.pop()
        return self.g.op("MultiHeadAttention", inputs, domain=FUSED, num_heads=heads, **scaled)

    def residual(self, x: str, skip: str, bias: Tensor | None, name: str) -> str:
        """Write ``x + skip + bias``, with the bias [H] of the layer before.

        Use one `Sum`, because the runtime would fuse an `Add` with the norm that follows
        (`residual_norm`).
        """
        total = [x, skip]
        if bias is not None:
            total.append(self.linear_ops.vector(f"{name}.skip.bias", bias))
        return self.g.op("Sum", total)

    def residual_norm(
        self, x: str, skip: str, bias: Tensor | None, name: str, norm: nn.LayerNorm
    ) -> str:
        """Write ``LayerNorm(x + skip + bias)``, with the bias [H] of the layer before.

        Do not use the fused `SkipLayerNormalization`, a scalar loop on a CPU
        (docs/decisions/0005-no-fused-skip-layer-norm.md), nor two `Add`, which the runtime would
        fuse.
        """
        return layer_norm(self.g, self.residual(x, skip, bias, name), name, norm)


class PackedTrunk(TrunkGraph):
    """Sequences of any lengths follow each other. Hidden states are [T, H].

    The variable-length flash kernel of CUDA runs only if queries, keys and values are three
    tensors and have no bias input.
    """

    layout = Layout.PACKED

    def __init__(self, linear_ops: LinearOps) -> None:
        super().__init__(linear_ops)
        self.declare(tensors.TOKEN_OFFSET)
        self.declare(tensors.CU_SEQLENS)

    def positions(self, table: Tensor) -> str:
        """See `TrunkGraph`."""
        position_ids = self.declare(tensors.POSITION_IDS)
        return self.linear_ops.look_up(tensors.POSITION_TABLE, table, position_ids)

    def norm(self, x: str, name: str, norm: nn.LayerNorm) -> str:
        """See `TrunkGraph`."""
        inputs = [x, *self._scale_and_shift(name, norm)]
        return self.g.op("LayerNormalization", inputs, axis=-1, epsilon=norm.eps)

    def norm_of_sum(self, terms: Sequence[str], name: str, norm: nn.LayerNorm) -> str:
        """See `TrunkGraph`."""
        first, *others = terms
        if not others:
            return self.norm(first, name, norm)
        rest = reduce(lambda one, other: self.g.op("Add", [one, other]), others)
        return self._skip_norm([first, rest], name, norm)

    def rotate(self, x: str, tables: Sequence[str], **sizes: int) -> str:
        """See `TrunkGraph`. The operator takes the tokens of all sequences as one sequence."""
        g, axis = self.g, self.g.ints(0)

        def write_positions() -> str:
            position_ids = g.op("Cast", [self.declare(tensors.POSITION_IDS)], to=TensorProto.INT64)
            return g.op("Unsqueeze", [position_ids, axis])  # [1, T]

        positions = self.once("positions", write_positions)
        inputs = [g.op("Unsqueeze", [x, axis]), positions, *tables]
        turned = g.op("RotaryEmbedding", inputs, domain=FUSED, **sizes)
        return g.op("Squeeze", [turned, axis])

    def attend(
        self, operands: tuple[str, str, str], heads: int, bias: str = "", scale: float | None = None
    ) -> str:
        """See `TrunkGraph`. Neither a bias nor `keys` have a packed graph."""
        assert not bias, "the variable-length kernel adds no bias to the scores"
        assert scale is None, "only attention with a bias has a scale of its own"
        assert not self.keys, "the variable-length kernel has no mask"
        places = [tensors.TOKEN_OFFSET.name, tensors.CU_SEQLENS.name]
        inputs = [*operands, "", *places]
        return self.g.op("PackedMultiHeadAttention", inputs, domain=FUSED, num_heads=heads)

    def residual_norm(
        self, x: str, skip: str, bias: Tensor | None, name: str, norm: nn.LayerNorm
    ) -> str:
        """See `TrunkGraph`."""
        written = [] if bias is None else [self.linear_ops.vector(f"{name}.skip.bias", bias)]
        return self._skip_norm([x, skip], name, norm, *written)

    def _skip_norm(self, terms: list[str], name: str, norm: nn.LayerNorm, *bias: str) -> str:
        """Write ``LayerNorm`` of the sum of two terms and an optional bias."""
        inputs = [*terms, *self._scale_and_shift(name, norm), *bias]
        return self.g.op("SkipLayerNormalization", inputs, domain=FUSED, epsilon=norm.eps)

    def _scale_and_shift(self, name: str, norm: nn.LayerNorm) -> list[str]:
        """Add the weights of a norm; the kernel for a GPU needs a shift, if only zeros."""
        shift = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
        vector = self.linear_ops.vector
        return [vector(f"{name}.weight", norm.weight), vector(f"{name}.bias", shift)]
