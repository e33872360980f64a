"""A transformer layer with its norms behind the residual connections (post-norm), and its parts.

Sources: Vaswani et al. 2017, section 3; Devlin et al. 2019.
Shapes: B sequences, S tokens each, H hidden size, I intermediate size, N attention heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.graph.builder import FUSED, GraphBuilder
from cloze.export.graph.trunk import TrunkGraph


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function.

    Attributes:
        fused: whether the operator is one of onnxruntime's that adds a bias first.
        least: a lower bound of the function; None: the function has none.
    """

    forward: Callable[[Tensor], Tensor]
    operator: str
    fused: bool = False
    least: float | None = None

    def write(self, g: GraphBuilder, product: str, bias: str) -> str:
        """Write ``activation(product + bias)``."""
        if self.fused:
            return g.op(self.operator, [product, bias], domain=FUSED)
        return g.op(self.operator, [g.op("Add", [product, bias])])


_GELU_LEAST = -0.171
"""A lower bound of GELU and of its approximation: both minima are from -0.1701 to -0.1699."""

_TANH_GELU = Activation(
    partial(F.gelu, approximate="tanh"), "FastGelu", fused=True, least=_GELU_LEAST
)

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": Activation(F.gelu, "BiasGelu", fused=True, least=_GELU_LEAST),
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "relu": Activation(F.relu, "Relu", least=0.0),
    "tanh": Activation(torch.tanh, "Tanh", least=-1.0),
}
"""``gelu`` is x * Phi(x), computed with the error function.

``gelu_new`` is its tanh approximation (Hendrycks & Gimpel 2016).
"""


class InputKind(Enum):
    """Where the input of a product comes from, which decides how int8 quantises the input."""

    NORM = auto()
    """A LayerNorm: a few channels are many times larger than the others."""

    ATTENTION = auto()
    """A mean of values, hence without outliers."""

    ACTIVATION = auto()
    """An activation function: the largest number differs much between tokens."""


class ProductGroup(NamedTuple):
    """Linear layers that multiply the same input; calibration and rounding iterate over these."""

    linears: tuple[nn.Linear, ...]
    input: InputKind


class SelfAttention(nn.Module):
    """Multi-head scaled dot-product attention (Vaswani et al. 2017, section 3.2).

    The graph folds biases exactly. With q' = q + b_q, k' = k + b_k, v' = v + b_v:

    - q' . k'_j = q' . k_j + q' . b_k, and the last term is the same for every j. The term cancels
      in the softmax, so keys need no bias.
    - The softmax weights of a row sum to 1, so b_v reaches the output as W_o b_v. That vector is
      added to the output's bias.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None, bias: Tensor | None = None
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            x: [B, S, H].
            attention_mask: bool [B, S], True for real tokens; None: all tokens are real.
            bias: [1, N, S, S], added to the scores; None: nothing is added.

        Returns:
            The attended states [B, S, H].
        """
        query, key, value = (
            split_heads(linear(x), self.heads) for linear in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        context = attend((query, key, value), _mask(attention_mask, bias), dropout)
        return self.output(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def products(self) -> dict[str, ProductGroup]:
        """Return the matrix products, by the name of each group's first layer."""
        return {
            "query": ProductGroup((self.query, self.key, self.value), InputKind.NORM),
            "output": ProductGroup((self.output,), InputKind.ATTENTION),
        }

    def write(self, trunk: TrunkGraph, name: str, x: str, bias: str = "") -> tuple[str, Tensor]:
        """Write the attention of each sequence to itself; see `TrunkGraph.attend`.

        Returns:
            The name of the attended states without their bias, and the bias [H].
        """
        ops = trunk.linear_ops
        entering = ops.prepare_input(x, f"{name}.query")
        query = ops.matmul(entering, f"{name}.query", self.query)
        query = trunk.g.op("Add", [query, ops.vector(f"{name}.query.bias", self.query.bias)])
        key = ops.matmul(entering, f"{name}.key", self.key)
        value = ops.matmul(entering, f"{name}.value", self.value)
        context = self._write_context(trunk, name, (query, key, value), bias)
        entering = ops.prepare_input(context, f"{name}.output")
        output = ops.matmul(entering, f"{name}.output", self.output)
        return output, self.output.bias + self.output.weight @ self.value.bias

    def _write_context(
        self,
        trunk: TrunkGraph,
        name: str,  # noqa: ARG002
        operands: tuple[str, str, str],
        bias: str,
    ) -> str:
        """Write the attention of queries to keys, which have no bias, and to values."""
        return trunk.attend(operands, self.heads, bias)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return [B, S, H] as [B, N, S, H / N]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _mask(attention_mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return what `F.scaled_dot_product_attention` adds to the scores or masks."""
    keys = None if attention_mask is None else attention_mask[:, None, None, :]
    if bias is None or keys is None:
        return keys if bias is None else bias
    return bias.masked_fill(~keys, -torch.inf)


def attend(
    operands: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout: float,
    scale: float | None = None,
) -> Tensor:
    """Return `F.scaled_dot_product_attention`, in fp32 on a CPU.

    There, the backward pass of bf16 takes three times as long as that of fp32 (torch 2.13).

    Args:
        operands: queries, keys and values [B, N, S, H / N].
        mask: what is added to the scores, or the keys that count; None: nothing, all.
        dropout: the share of weights that are set to 0.
        scale: the factor of the scores; None: that of the paper.
    """
    if operands[0].device.type != "cpu":
        return F.scaled_dot_product_attention(*operands, mask, dropout, scale=scale)
    with torch.autocast("cpu", enabled=False):
        query, key, value = (operand.float() for operand in operands)
        if mask is not None and mask.is_floating_point():
            mask = mask.float()
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)


class Layer(nn.Module):
    """Attention, then a feed-forward network; each is added to its input and normalised."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)

    def products(self) -> dict[str, ProductGroup]:
        """Return the matrix products, by the name of each group's first layer."""
        return self.attention.products() | {
            "up": ProductGroup((self.up,), InputKind.NORM),
            "down": ProductGroup((self.down,), InputKind.ACTIVATION),
        }

    def forward(
        self, x: Tensor, attention_mask: Tensor | None, bias: Tensor | None = None
    ) -> Tensor:
        """Transform the hidden states [B, S, H]."""
        x = self.attention_norm(x + self.dropout(self.attention(x, attention_mask, bias)))
        return self.output_norm(x + self.dropout(self.down(self.activation.forward(self.up(x)))))  # type: ignore[no-any-return]

    def write(self, trunk: TrunkGraph, name: str, x: str, bias: str = "") -> str:
        """Write the layer: hidden states -> hidden states; see `TrunkGraph.attend`."""
        ops = trunk.linear_ops
        attended, output_bias = self.attention.write(trunk, name, x, bias)
        norm = self.attention_norm
        x = trunk.residual_norm(attended, x, output_bias, f"{name}.attention_norm", norm)
        up = ops.matmul(ops.prepare_input(x, f"{name}.up"), f"{name}.up", self.up)
        up = self.activation.write(trunk.g, up, ops.vector(f"{name}.up.bias", self.up.bias))
        entering = ops.prepare_input(up, f"{name}.down", self.activation.least)
        down = ops.matmul(entering, f"{name}.down", self.down)
        norm = self.output_norm
        return trunk.residual_norm(down, x, self.down.bias, f"{name}.output_norm", norm)
