"""The trunk of a model: embeddings of words, positions and token types, and a stack of layers.

Shapes: B sequences, S tokens each, H hidden size, E embedding size, N states.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.layer import EncoderLayer, InputKind, Layer, ProductGroup, make_norm
from cloze.export.blocks.relative_bias import Distances
from cloze.export.blocks.rotary import Rotary
from cloze.export.graph.trunk import TrunkGraph
from cloze.model_store import tensors


class Embeddings(nn.Module):
    """The normalised sum of word, position and token type embeddings.

    Embeddings of another width than the hidden size are projected to it, so that the word table
    stays small. With ``norm_is_last``, the projection has no bias and stands before the norm.
    Rotary positions have no embeddings. Sources: Devlin et al. 2019, section 3; Lan et al. 2020,
    section 3.1.
    """

    def __init__(self, config: EncoderConfig, *, norm_is_last: bool = False) -> None:
        super().__init__()
        width, size = config.embedding_width, config.hidden_size
        self.norm_is_last = norm_is_last
        self.word = nn.Embedding(config.vocab_size, width)
        has_positions = config.position_embeddings and config.rotary_base is None
        self.position = nn.Embedding(config.max_positions, width) if has_positions else None
        self.token_type = (
            nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        )
        self.norm = make_norm(config, size if norm_is_last else width)
        has_bias = not norm_is_last
        self.projection = nn.Linear(width, size, has_bias) if config.embedding_size else None

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Return the embeddings [B, S, H] of tokens, int [B, S]; without types, all are 0."""
        x: Tensor = self.word(input_ids)
        if self.position is not None:
            x = x + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        if self.token_type is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(input_ids)
            x = x + self.token_type(token_type_ids)
        x = x if self.norm_is_last else self.norm(x)
        x = x if self.projection is None else self.projection(x)
        return self.norm(x) if self.norm_is_last else x

    def tables(self) -> dict[str, nn.Embedding]:
        """Return the tables that the graph looks up, by the names of their weights."""
        tables = {
            tensors.WORD_TABLE: self.word,
            tensors.POSITION_TABLE: self.position,
            tensors.TOKEN_TYPE_TABLE: self.token_type,
        }
        return {name: table for name, table in tables.items() if table is not None}

    def products(self) -> dict[str, ProductGroup]:
        """Return the matrix products, by the name of each group's first layer."""
        if self.projection is None:
            return {}
        return {"projection": ProductGroup((self.projection,), InputKind.NORM)}

    def write(self, trunk: TrunkGraph) -> str:
        """Declare the trunk's inputs and write the embeddings.

        Do not use the fused `EmbedLayerNormalization`: its table must be floats, and on a CPU it is
        a scalar loop (docs/decisions/0005-no-fused-skip-layer-norm.md).
        """
        input_ids = trunk.declare(tensors.INPUT_IDS)
        look_up = trunk.linear_ops.look_up
        terms = [look_up(tensors.WORD_TABLE, self.word.weight, input_ids)]
        if self.token_type is not None:
            type_ids = trunk.declare(tensors.TOKEN_TYPE_IDS)
            terms.append(look_up(tensors.TOKEN_TYPE_TABLE, self.token_type.weight, type_ids))
        if self.position is not None:
            terms.append(trunk.positions(self.position.weight))
        if not self.norm_is_last:
            terms = [trunk.norm_of_sum(terms, "embeddings.norm", self.norm)]
        if self.projection is not None:
            ops, name = trunk.linear_ops, "embeddings.projection"
            x = trunk.g.op("Sum", terms) if len(terms) > 1 else terms[0]
            entering = ops.prepare_input(x, name, self.projection.in_features)
            product = ops.matmul(entering, name, self.projection)
            terms = [ops.biased(product, name, self.projection)]
        if not self.norm_is_last:
            return terms[0]
        return trunk.norm_of_sum(terms, "embeddings.norm", self.norm)


class Encoder(nn.Module):
    """The encoder: token ids to hidden states.

    Args:
        layers: the layers in order; a layer that stands twice has its weights once.
        relative_bias: what all layers share about the distances of tokens; None: nothing.
        final_norm: the norm of the last layer's output; None: there is none.
    """

    relative_bias: Distances | None
    final_norm: nn.LayerNorm | None

    def __init__(
        self,
        embeddings: Embeddings,
        layers: Iterable[EncoderLayer],
        relative_bias: Distances | None = None,
        final_norm: nn.LayerNorm | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.ModuleList(layers)
        self.relative_bias = relative_bias
        self.final_norm = final_norm

    def states(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> list[Tensor]:
        """Encode a batch.

        Args:
            input_ids: int [B, S], S at most ``config.max_positions``.
            token_type_ids: int [B, S]; None: all 0. A family without token types ignores them.
            attention_mask: bool [B, S], True for tokens to which others attend; None: all.

        Returns:
            The embeddings and the output of each layer, N times [B, S, H].
        """
        states = [self.embeddings(input_ids, token_type_ids)]
        bias = None if self.relative_bias is None else self.relative_bias(input_ids.shape[1])
        for layer in self.layers:
            states.append(layer(states[-1], attention_mask, bias))
        if self.final_norm is not None:
            states[-1] = self.final_norm(states[-1])
        return states

    def named_layers(self) -> list[tuple[str, EncoderLayer]]:
        """Return each layer in order with its name, which is that of its first place."""
        names: dict[nn.Module, str] = {}
        return [
            (names.setdefault(layer, f"layers.{number}"), cast(EncoderLayer, layer))
            for number, layer in enumerate(self.layers)
        ]

    def products(self) -> dict[str, ProductGroup]:
        """Return all matrix products, each once, by their names in the graph."""
        blocks: list[tuple[str, Embeddings | EncoderLayer]] = [
            ("embeddings", self.embeddings),
            *self.named_layers(),
        ]
        return {
            f"{name}.{part}": group
            for name, block in blocks
            for part, group in block.products().items()
        }

    def write(self, trunk: TrunkGraph) -> list[str]:
        """Write the trunk; return the names of the embeddings and of each layer's output."""
        states = [self.embeddings.write(trunk)]
        bias = "" if self.relative_bias is None else self.relative_bias.write(trunk)
        for number, (name, layer) in enumerate(self.named_layers(), 1):
            trunk.is_last = number == len(self.layers)
            states.append(layer.write(trunk, name, states[-1], bias))
        if self.final_norm is not None:
            states[-1] = trunk.norm(states[-1], "final_norm", self.final_norm)
        return states


def post_norm_encoder(config: EncoderConfig) -> Encoder:
    """Return an encoder like that of Devlin et al. 2019, with the options of its sizes."""
    rotary = None if config.rotary_base is None else Rotary.of(config, config.rotary_base)
    layers = (Layer(config, rotary) for _ in range(config.layers))
    return Encoder(Embeddings(config), layers)
