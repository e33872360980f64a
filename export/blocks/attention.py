"""Multi-head self-attention (Vaswani et al. 2017, section 3.2).

The graph folds biases exactly. With q' = q + b_q, k' = k + b_k, v' = v + b_v:

- q' . k'_j = q' . k_j + q' . b_k, and the last term is the same for every j. The term cancels in
  the softmax, so keys need no bias.
- The softmax weights of a row sum to 1, so b_v reaches the output as W_o b_v. That vector is added
  to the output's bias.

Shapes: B sequences, S tokens each, H hidden size, N attention heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.products import InputKind, ProductGroup
from cloze.export.graph.trunk import TrunkGraph


class SelfAttention(nn.Module):
    """Multi-head scaled dot-product attention (Vaswani et al. 2017, section 3.2)."""

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
            self._split(linear(x)) for linear in (self.query, self.key, self.value)
        )
        context = _attend(
            query,
            key,
            value,
            _mask(attention_mask, bias),
            self.dropout if self.training else 0.0,
        )
        return self.output(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # [B, S, H] -> [B, N, S, H / N]

    def products(self) -> dict[str, ProductGroup]:
        """Return the matrix products, by the name of each group's first layer."""
        return {
            "query": ProductGroup((self.query, self.key, self.value), InputKind.NORM),
            "output": ProductGroup((self.output,), InputKind.ATTENTION),
        }

    def write(self, trunk: TrunkGraph, name: str, x: str, bias: str = "") -> tuple[str, Tensor]:
        """Write the attention of each sequence to itself.

        Args:
            trunk: the graph.
            name: name of the layer.
            x: name of the hidden states.
            bias: name of the bias of the scores [1, N, S, S]; "": nothing is added.

        Returns:
            The name of the attended states without their bias, and the bias [H].
        """
        entering = trunk.prepare(x, f"{name}.query")
        query = trunk.matmul(entering, f"{name}.query", self.query)
        query = trunk.g.op("Add", [query, trunk.vector(f"{name}.query.bias", self.query.bias)])
        key = trunk.matmul(entering, f"{name}.key", self.key)
        value = trunk.matmul(entering, f"{name}.value", self.value)
        context = trunk.layout.attend(trunk.g, (query, key, value), self.heads, bias)
        output = trunk.matmul(
            trunk.prepare(context, f"{name}.output"), f"{name}.output", self.output
        )
        return output, self.output.bias + self.output.weight @ self.value.bias


def _mask(attention_mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return what `F.scaled_dot_product_attention` adds to the scores or masks."""
    keys = None if attention_mask is None else attention_mask[:, None, None, :]
    if bias is None or keys is None:
        return keys if bias is None else bias
    return bias.masked_fill(~keys, -torch.inf)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """Return `F.scaled_dot_product_attention`, in fp32 on a CPU.

    There, the backward pass of bf16 takes three times as long as that of fp32 (torch 2.13).
    """
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, mask, dropout)
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), mask, dropout
        )
