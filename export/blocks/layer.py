"""A transformer layer with its norms behind the residual connections (post-norm).

Sources: Vaswani et al. 2017, section 3; Devlin et al. 2019.
Shapes: B sequences, S tokens each, H hidden size, I intermediate size.
"""

from torch import Tensor, nn

from cloze.export.blocks.activations import ACTIVATIONS
from cloze.export.blocks.attention import SelfAttention
from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.products import InputKind, ProductGroup
from cloze.export.graph.layouts import ResidualNorm
from cloze.export.graph.trunk import TrunkGraph


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
        """Write the layer: hidden states -> hidden states; see `SelfAttention.write`."""
        attended, output_bias = self.attention.write(trunk, name, x, bias)
        norm = ResidualNorm(f"{name}.attention_norm", output_bias, self.attention_norm)
        x = trunk.residual_norm(attended, x, norm)
        up = trunk.matmul(trunk.prepare(x, f"{name}.up"), f"{name}.up", self.up)
        up = self.activation.write(trunk.g, up, trunk.vector(f"{name}.up.bias", self.up.bias))
        entering = trunk.prepare(up, f"{name}.down", self.activation.least)
        down = trunk.matmul(entering, f"{name}.down", self.down)
        norm = ResidualNorm(f"{name}.output_norm", self.down.bias, self.output_norm)
        return trunk.residual_norm(down, x, norm)
