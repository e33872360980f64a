"""A transformer layer whose norms stand before its parts (pre-norm).

Shapes: B sequences, S tokens each, H hidden size.
"""

from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.layer import Layer
from cloze.export.blocks.rotary import Rotary
from cloze.export.blocks.window import Window
from cloze.export.graph.trunk import TrunkGraph


class PreNormLayer(Layer):
    """A layer whose norms stand before attention and the feed-forward network (pre-norm).

    Source: Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture". The first
    layer of an encoder has no norm before attention, because the embeddings are normalised.

    Args:
        is_first: whether the layer is the first one.
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

    def forward(
        self, x: Tensor, attention_mask: Tensor | None, bias: Tensor | None = None
    ) -> Tensor:
        """Transform the hidden states [B, S, H]."""
        x = x + self.dropout(self.attention(self.attention_norm(x), attention_mask, bias))
        output: Tensor = x + self.dropout(self._feed_forward(self.output_norm(x)))
        return output

    def write(self, trunk: TrunkGraph, name: str, x: str, bias: str = "") -> str:
        """Write the layer: hidden states -> hidden states; see `TrunkGraph.attend`."""
        entering = x
        if isinstance(self.attention_norm, nn.LayerNorm):
            entering = trunk.norm(x, f"{name}.attention_norm", self.attention_norm)
        attended, output_bias = self.attention.write(trunk, name, entering, bias)
        x = trunk.residual(attended, x, output_bias, f"{name}.attention")
        entering = trunk.norm(x, f"{name}.output_norm", self.output_norm)
        down = self._write_feed_forward(trunk, name, entering)
        return trunk.residual(down, x, self.down.bias, f"{name}.down")
