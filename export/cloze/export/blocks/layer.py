"""A transformer layer with its norms behind the residual connections (post-norm), and its parts.

Sources: Vaswani et al. 2017, section 3; Devlin et al. 2019.
Shapes: B sequences, S tokens each, H hidden size, I intermediate size, N attention heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.rotary import Rotary
from cloze.export.blocks.window import Window
from cloze.export.graph.builder import FUSED, GraphBuilder
from cloze.export.graph.linear_ops import LinearInput, LinearOps
from cloze.export.graph.trunk import TrunkGraph


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function.

    Attributes:
        operator: the function's operator.
        biased: onnxruntime's operator that adds a bias first; "": there is none.
        least: a lower bound of the function; None: the function has none.
        attributes: the domain and the attributes of ``operator``.
    """

    forward: Callable[[Tensor], Tensor]
    operator: str
    biased: str = ""
    least: float | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def write(self, g: GraphBuilder, product: str, bias: str = "") -> str:
        """Write ``activation(product + bias)``, or ``activation(product)`` without a bias."""
        if bias and self.biased:
            return g.op(self.biased, [product, bias], domain=FUSED)
        if bias:
            product = g.op("Add", [product, bias])
        return g.op(self.operator, [product], **self.attributes)

    def write_product(self, ops: LinearOps, x: LinearInput, name: str, linear: nn.Linear) -> str:
        """Write ``activation(x @ W^T + bias)``: [..., in] -> [..., out].

        onnxruntime's ``Gelu`` is 1.6 times as fast as ``BiasGelu``, so the product adds the bias if
        it can.
        """
        bias = "" if linear.bias is None else ops.vector(f"{name}.bias", linear.bias)
        if ops.adds_bias(x):
            return self.write(ops.g, ops.matmul(x, name, linear, bias))
        return self.write(ops.g, ops.matmul(x, name, linear), bias)


_GELU_LEAST = -0.171
"""A lower bound of GELU and of its approximation: both minima are from -0.1701 to -0.1699."""

_TANH_GELU = Activation(
    partial(F.gelu, approximate="tanh"), "Gelu", "FastGelu", _GELU_LEAST, {"approximate": "tanh"}
)

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": Activation(F.gelu, "Gelu", "BiasGelu", _GELU_LEAST),
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "relu": Activation(F.relu, "Relu", least=0.0),
    "silu": Activation(F.silu, "QuickGelu", "", -0.2785, {"domain": FUSED, "alpha": 1.0}),
    "tanh": Activation(torch.tanh, "Tanh", least=-1.0),
}
"""``gelu`` is x * Phi(x), computed with the error function.

``gelu_new`` is its tanh approximation (Hendrycks & Gimpel 2016). ``silu`` is x * sigmoid(x).
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
      in the softmax, so keys need no bias, unless they are rotated by their positions.
    - The softmax weights of a row sum to 1, so b_v reaches the output as W_o b_v. That vector is
      added to the output's bias.

    Args:
        rotary: the rotation of queries and keys; None: they are not rotated.
        window: the keys that a token attends to; None: all of its sequence.
    """

    rotary: Rotary | None

    def __init__(
        self, config: EncoderConfig, rotary: Rotary | None = None, window: Window | None = None
    ) -> None:
        super().__init__()
        self.window = window
        self.heads = config.heads
        self.rotary = rotary
        size, has_bias = config.hidden_size, config.has_bias("attention")
        self.query = nn.Linear(size, size, has_bias)
        self.key = nn.Linear(size, size, has_bias)
        self.value = nn.Linear(size, size, has_bias)
        self.output = nn.Linear(size, size, has_bias)

    def forward(
        self, x: Tensor, mask: Tensor | None, bias: Tensor | None, values: Tensor | None = None
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            x: [B, S, H].
            mask: bool [B, S], True for real tokens; None: all tokens are real.
            bias: [1, N, S, S], added to the scores; None: nothing is added.
            values: [B, S, ...], of which values are made; None: ``x``.

        Returns:
            The attended states [B, S, H].
        """
        products = self.query(x), self.key(x), self.value(x if values is None else values)
        query, key, value = (split_heads(product, self.heads) for product in products)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        band = None if self.window is None else self.window.mask(x.shape[1], x.device)
        context = F.scaled_dot_product_attention(query, key, value, _mask(mask, bias, band))
        return self.output(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def products(self) -> dict[str, ProductGroup]:
        """Return the matrix products, by the name of each group's first layer."""
        return {
            "query": ProductGroup((self.query, self.key, self.value), InputKind.NORM),
            "output": ProductGroup((self.output,), InputKind.ATTENTION),
        }

    def write(
        self,
        trunk: TrunkGraph,
        name: str,
        x: str,
        bias: str = "",
        values: LinearInput | None = None,
    ) -> tuple[str, Tensor | None]:
        """Write the attention of each sequence to itself; see `TrunkGraph.attend`.

        Args:
            values: what values are made of; None: ``x``.

        Returns:
            The name of the attended states without their bias, and the bias [H], if any.
        """
        ops = trunk.linear_ops
        entering = ops.prepare_input(x, f"{name}.query", self.query.in_features)
        query = ops.matmul(entering, f"{name}.query", self.query)
        query = ops.biased(query, f"{name}.query", self.query)
        key = ops.matmul(entering, f"{name}.key", self.key)
        if self.rotary is not None:
            key = ops.biased(key, f"{name}.key", self.key)
            query, key = (self.rotary.write(trunk, one, self.heads) for one in (query, key))
        value = ops.matmul(values or entering, f"{name}.value", self.value)
        context = trunk.kept(self._write_context(trunk, name, (query, key, value), bias))
        entering = ops.prepare_input(context, f"{name}.output", self.output.in_features)
        # An adapter of the output reads the values with their bias.
        entering = replace(entering, offset=self.value.bias)
        output = ops.matmul(entering, f"{name}.output", self.output)
        if self.output.bias is None:
            return output, None
        return output, self.output.bias + self.output.weight @ self.value.bias

    def _write_context(
        self,
        trunk: TrunkGraph,
        name: str,  # noqa: ARG002
        operands: tuple[str, str, str],
        bias: str,
    ) -> str:
        """Write the attention of queries to keys, which have no bias, and to values."""
        if self.window is None:
            return trunk.attend(operands, self.heads, bias)
        assert not bias, "a window has no bias of the scores beside it"
        width = self.query.out_features // self.heads
        return self.window.write(trunk, operands, self.heads, width)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return [B, S, H] as [B, N, S, H / N]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _mask(mask: Tensor | None, bias: Tensor | None, band: Tensor | None) -> Tensor | None:
    """Return what attention adds to scores or masks; ``band`` [S, S] has the keys of each token."""
    keys = None if mask is None else mask[:, None, None, :]
    if band is not None:
        keys = band if keys is None else band & keys  # a row without keys attends to nothing
    if bias is None or keys is None:
        return keys if bias is None else bias
    return bias.masked_fill(~keys, -torch.inf)


def make_norm(config: EncoderConfig, width: int | None = None) -> nn.LayerNorm:
    """Return a norm of the hidden states, or of rows of another width."""
    size, has_bias = width or config.hidden_size, config.has_bias("norm")
    return nn.LayerNorm(size, config.layer_norm_eps, bias=has_bias)


class EncoderLayer(nn.Module, ABC):
    """A layer of an encoder: hidden states [B, S, H] -> hidden states [B, S, H].

    It is called with the states, a mask of real tokens and a bias of scores; see `SelfAttention`.
    """

    @abstractmethod
    def products(self) -> dict[str, ProductGroup]:
        """Return the matrix products, by the name of each group's first layer."""

    @abstractmethod
    def write(self, trunk: TrunkGraph, name: str, x: str, bias: str = "") -> str:
        """Write the layer: hidden states -> hidden states; see `TrunkGraph.attend`."""


class Layer(EncoderLayer):
    """Attention, then a feed-forward network; each is added to its input and normalised.

    A gated feed-forward network is ``down(activation(gate(x)) * up(x))`` (Shazeer 2020, "GLU
    Variants Improve Transformer", section 2). The rules of a family say which half of a packed
    matrix is the gate.
    """

    gate: nn.Linear | None

    def __init__(
        self, config: EncoderConfig, rotary: Rotary | None = None, window: Window | None = None
    ) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.attention = SelfAttention(config, rotary, window)
        self.attention_norm: nn.Module = make_norm(config)
        self.gate = nn.Linear(size, inner, config.has_bias("up")) if config.gated else None
        self.up = nn.Linear(size, inner, config.has_bias("up"))
        self.down = nn.Linear(inner, size, config.has_bias("down"))
        self.output_norm = make_norm(config)
        self.activation = ACTIVATIONS[config.activation]

    def products(self) -> dict[str, ProductGroup]:
        """Return the matrix products, by the name of each group's first layer."""
        entering = (self.up,) if self.gate is None else (self.up, self.gate)
        return self.attention.products() | {
            "up": ProductGroup(entering, InputKind.NORM),
            "down": ProductGroup((self.down,), InputKind.ACTIVATION),
        }

    def forward(self, x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Transform the hidden states [B, S, H]."""
        x = self.attention_norm(x + self.attention(x, mask, bias))
        output: Tensor = self.output_norm(x + self._feed_forward(x))
        return output

    def _feed_forward(self, x: Tensor) -> Tensor:
        activate = self.activation.forward
        inner = activate(self.up(x)) if self.gate is None else activate(self.gate(x)) * self.up(x)
        return self.down(inner)  # type: ignore[no-any-return]

    def write(self, trunk: TrunkGraph, name: str, x: str, bias: str = "") -> str:
        """Write the layer: hidden states -> hidden states; see `TrunkGraph.attend`."""
        attended, output_bias = self.attention.write(trunk, name, x, bias)
        norm = cast(nn.LayerNorm, self.attention_norm)
        skip, norm_name = trunk.kept(x), f"{name}.attention_norm"
        x = trunk.residual_norm(attended, skip, output_bias, norm_name, norm)
        down = self._write_feed_forward(trunk, name, x)
        norm = self.output_norm
        return trunk.residual_norm(down, x, self.down.bias, f"{name}.output_norm", norm)

    def _write_feed_forward(self, trunk: TrunkGraph, name: str, x: str) -> str:
        """Write the feed-forward network without its last bias."""
        ops = trunk.linear_ops
        entering, least = ops.prepare_input(x, f"{name}.up", self.up.in_features), None
        if self.gate is None:
            inner = self.activation.write_product(ops, entering, f"{name}.up", self.up)
            least = self.activation.least
        else:
            gate = self.activation.write_product(ops, entering, f"{name}.gate", self.gate)
            up = ops.biased(ops.matmul(entering, f"{name}.up", self.up), f"{name}.up", self.up)
            inner = trunk.g.op("Mul", [gate, up])
        entering = ops.prepare_input(inner, f"{name}.down", self.down.in_features, least)
        return ops.matmul(entering, f"{name}.down", self.down)


class PreNormLayer(Layer):
    """A layer whose norms stand before attention and the feed-forward network (pre-norm).

    Source: Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture". The first
    layer of an encoder has no norm before attention, because the embeddings are normalised.
    """

    def __init__(
        self,
        config: EncoderConfig,
        rotary: Rotary | None = None,
        window: Window | None = None,
        *,
        is_first: bool,
    ) -> None:
        super().__init__(config, rotary, window)
        if is_first:
            self.attention_norm = nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Transform the hidden states [B, S, H]."""
        x = x + self.attention(self.attention_norm(x), mask, bias)
        output: Tensor = x + self._feed_forward(self.output_norm(x))
        return output

    def write(self, trunk: TrunkGraph, name: str, x: str, bias: str = "") -> str:
        """Write the layer: hidden states -> hidden states; see `TrunkGraph.attend`."""
        entering = x
        if isinstance(self.attention_norm, nn.LayerNorm):
            entering = trunk.norm(x, f"{name}.attention_norm", self.attention_norm)
        attended, output_bias = self.attention.write(trunk, name, entering, bias)
        x = trunk.residual(attended, trunk.kept(x), output_bias, f"{name}.attention")
        entering = trunk.norm(x, f"{name}.output_norm", self.output_norm)
        down = self._write_feed_forward(trunk, name, entering)
        return trunk.residual(down, x, self.down.bias, f"{name}.down")
