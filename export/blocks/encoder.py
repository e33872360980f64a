"""The trunk of a model: embeddings and a stack of layers.

Shapes: B sequences, S tokens each, H hidden size, N states.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.embeddings import Embeddings
from cloze.export.blocks.layer import Layer
from cloze.export.blocks.products import ProductGroup
from cloze.export.blocks.relative_bias import RelativeBias
from cloze.export.graph.trunk import TrunkGraph


class Encoder(nn.Module):
    """The encoder: token ids to hidden states.

    Args:
        embeddings: the first block.
        layers: the layers in order; a layer that stands twice has its weights once.
        relative_bias: the bias that all layers add to their scores; None: they add none.
    """

    relative_bias: RelativeBias | None

    def __init__(
        self,
        embeddings: Embeddings,
        layers: Iterable[Layer],
        relative_bias: RelativeBias | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.ModuleList(layers)
        self.relative_bias = relative_bias

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        first_positions: Tensor | None = None,
    ) -> Tensor:
        """Encode a batch.

        Args:
            input_ids: int [B, S], S at most ``config.max_positions``.
            token_type_ids: int [B, S]; None: all 0. A family without token types ignores them.
            attention_mask: bool [B, S], True for real tokens; None: all tokens are real.
            first_positions: int [B], the position of each first token; None: all 0. Only training
                sets other positions.

        Returns:
            The hidden states [B, S, H].
        """
        x: Tensor = self.embeddings(input_ids, token_type_ids, first_positions)
        bias = self._bias(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask, bias)
        return x

    def states(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return the embeddings and the output of each layer, [N, B, S, H]; see `forward`."""
        states = [self.embeddings(input_ids, token_type_ids)]
        bias = self._bias(input_ids)
        for layer in self.layers:
            states.append(layer(states[-1], None, bias))
        return torch.stack(states)

    def _bias(self, input_ids: Tensor) -> Tensor | None:
        return None if self.relative_bias is None else self.relative_bias(input_ids.shape[1])

    def named_layers(self) -> list[tuple[str, Layer]]:
        """Return each layer in order with its name, which is that of its first place."""
        names: dict[nn.Module, str] = {}
        return [
            (names.setdefault(layer, f"layers.{number}"), cast(Layer, layer))
            for number, layer in enumerate(self.layers)
        ]

    def products(self) -> dict[str, ProductGroup]:
        """Return all matrix products, each once, by their names in the graph."""
        blocks: list[tuple[str, Embeddings | Layer]] = [
            ("embeddings", self.embeddings),
            *self.named_layers(),
        ]
        return {
            f"{name}.{part}": group
            for name, block in blocks
            for part, group in block.products().items()
        }

    def write(self, trunk: TrunkGraph) -> list[str]:
        """Write the trunk's inputs, embeddings and layers.

        Returns:
            The names of the embeddings and of each layer's output, in the layout's shape.
        """
        states = [self.embeddings.write(trunk)]
        bias = "" if self.relative_bias is None else self.relative_bias.write(trunk)
        for name, layer in self.named_layers():
            states.append(layer.write(trunk, name, states[-1], bias))
        return states


def post_norm_encoder(config: EncoderConfig) -> Encoder:
    """Return the encoder of Devlin et al. 2019, with or without token types."""
    return Encoder(Embeddings(config), (Layer(config) for _ in range(config.layers)))
