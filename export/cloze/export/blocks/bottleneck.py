"""Layers with a bottleneck, and embeddings of a token with its neighbours.

Source: Sun et al. 2020, "MobileBERT", sections 3.1 to 3.3.
Shapes: B sequences, S tokens each, H hidden size, E embedding size, K size of the bottleneck.
"""

from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import Embeddings, Encoder
from cloze.export.blocks.layer import (
    ACTIVATIONS,
    Activation,
    EncoderLayer,
    InputKind,
    ProductGroup,
    SelfAttention,
)
from cloze.export.graph.trunk import TrunkGraph
from cloze.model_store import tensors

# Without normalisation, a token's states may be many times larger than another's: each product
# takes one scale per token.
_KIND = InputKind.ACTIVATION


class ElementwiseNorm(nn.Module):
    """One factor and one bias per channel instead of a LayerNorm ("NoNorm", section 3.3)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Transform [..., size]."""
        return x * self.weight + self.bias

    def write(self, trunk: TrunkGraph, name: str, terms: list[str], bias: Tensor | None) -> str:
        """Write the norm of the sum of terms and of the bias [size] of the layer before.

        The two biases are one: ``(x + b) * w + c = x * w + (b * w + c)``.
        """
        ops, g = trunk.linear_ops, trunk.g
        total = terms[0] if len(terms) == 1 else g.op("Sum", terms)
        scaled = g.op("Mul", [total, ops.vector(f"{name}.weight", self.weight)])
        shift = self.bias if bias is None else bias * self.weight + self.bias
        folded = ops.vector(f"{name}.folded.bias", shift)
        return g.op("Add", [scaled, folded])


class TrigramEmbeddings(Embeddings):
    """Embeddings of the next token, the token and the one before, projected to the hidden size.

    Beyond the ends of a text, the neighbours are vectors of zeros. The projection is added to the
    embeddings of positions and types, which have the hidden size.
    """

    position: nn.Embedding
    token_type: nn.Embedding
    projection: nn.Linear
    norm: ElementwiseNorm  # type: ignore[assignment]

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.position = nn.Embedding(config.max_positions, size)
        self.token_type = nn.Embedding(config.type_vocab_size, size)
        self.projection = nn.Linear(3 * config.embedding_width, size)
        self.norm = ElementwiseNorm(size)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """See `Embeddings`."""
        words: Tensor = self.word(input_ids)
        after, before = F.pad(words[:, 1:], (0, 0, 0, 1)), F.pad(words[:, :-1], (0, 0, 1, 0))
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        x = self.projection(torch.cat([after, words, before], dim=-1))
        x = x + self.position(positions) + self.token_type(token_type_ids)
        return self.norm(x)  # type: ignore[no-any-return]

    def products(self) -> dict[str, ProductGroup]:
        """Return the matrix products, by the name of each group's first layer."""
        return {"projection": ProductGroup((self.projection,), _KIND)}

    def write(self, trunk: TrunkGraph) -> str:
        """Declare the trunk's inputs and write the embeddings, in the dense layout."""
        g, ops, name = trunk.g, trunk.linear_ops, "embeddings.projection"
        words = ops.look_up(tensors.WORD_TABLE, self.word.weight, trunk.declare(tensors.INPUT_IDS))
        types = ops.look_up(
            tensors.TOKEN_TYPE_TABLE, self.token_type.weight, trunk.declare(tensors.TOKEN_TYPE_IDS)
        )
        axis, end = g.ints(1), g.ints(np.iinfo(np.int64).max)
        wide = g.op("Pad", [words, g.ints(1, 1), "", axis])  # [B, S + 2, E]
        after = g.op("Slice", [wide, g.ints(2), end, axis])
        before = g.op("Slice", [wide, g.ints(0), g.ints(-2), axis])
        trigrams = g.op("Concat", [after, words, before], axis=-1)  # [B, S, 3 E]
        entering = ops.prepare_input(trigrams, name, self.projection.in_features)
        product = ops.matmul(entering, name, self.projection)
        terms = [product, types, trunk.positions(self.position.weight)]
        return self.norm.write(trunk, "embeddings.norm", terms, self.projection.bias)


class FeedForward(nn.Module):
    """A feed-forward network, which is added to its input [..., K] and normalised."""

    def __init__(self, config: EncoderConfig, activation: Activation) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.norm = ElementwiseNorm(config.hidden_size)
        self.activation = activation

    def products(self, name: str) -> dict[str, ProductGroup]:
        """Return the matrix products, by the name of each group's first layer."""
        return {
            f"{name}.up": ProductGroup((self.up,), _KIND),
            f"{name}.down": ProductGroup((self.down,), _KIND),
        }

    def forward(self, x: Tensor) -> Tensor:
        """Transform [..., K]."""
        return self.norm(self.down(self.activation.forward(self.up(x))) + x)  # type: ignore[no-any-return]

    def write(self, trunk: TrunkGraph, name: str, x: str) -> str:
        """Write the network."""
        ops = trunk.linear_ops
        entering = ops.prepare_input(x, f"{name}.up", self.up.in_features)
        up = self.activation.write_product(ops, entering, f"{name}.up", self.up)
        least = self.activation.least
        entering = ops.prepare_input(up, f"{name}.down", self.down.in_features, least)
        down = ops.matmul(entering, f"{name}.down", self.down)
        return self.norm.write(trunk, f"{name}.norm", [down, x], self.down.bias)


class BottleneckAttention(SelfAttention):
    """Attention within the bottleneck, whose values are made of the layer's input [..., H]."""

    def __init__(self, config: EncoderConfig, values_size: int) -> None:
        super().__init__(config)
        self.value = nn.Linear(values_size, config.hidden_size)

    def products(self) -> dict[str, ProductGroup]:
        """Return the matrix products of queries, keys and the output."""
        return {
            "attention.query": ProductGroup((self.query, self.key), _KIND),
            "attention.output": ProductGroup((self.output,), _KIND),
        }


class BottleneckLayer(EncoderLayer):
    """A layer whose attention and feed-forward networks have the size of a bottleneck.

    Queries and keys are made of the same K channels, values of all H channels. Several feed-forward
    networks follow each other. Each norm has a factor and a bias per channel.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        assert config.bottleneck is not None
        narrow = replace(config, hidden_size=config.bottleneck)
        self.reduce = nn.Linear(config.hidden_size, config.bottleneck)
        self.reduce_norm = ElementwiseNorm(config.bottleneck)
        self.shared = nn.Linear(config.hidden_size, config.bottleneck)
        self.shared_norm = ElementwiseNorm(config.bottleneck)
        self.attention = BottleneckAttention(narrow, config.hidden_size)
        self.attention_norm = ElementwiseNorm(config.bottleneck)
        activation = ACTIVATIONS[config.activation]
        self.networks = nn.ModuleList(
            FeedForward(narrow, activation) for _ in range(config.feed_forwards)
        )
        self.expand = nn.Linear(config.bottleneck, config.hidden_size)
        self.output_norm = ElementwiseNorm(config.hidden_size)

    def _networks(self) -> list[tuple[str, FeedForward]]:
        """Return the feed-forward networks with their names."""
        return [
            (f"networks.{number}", cast(FeedForward, network))
            for number, network in enumerate(self.networks)
        ]

    def products(self) -> dict[str, ProductGroup]:
        """Return the matrix products, by the name of each group's first layer."""
        entering = (self.reduce, self.shared, self.attention.value)
        groups = {"reduce": ProductGroup(entering, _KIND)} | self.attention.products()
        for name, network in self._networks():
            groups |= network.products(name)
        return groups | {"expand": ProductGroup((self.expand,), _KIND)}

    def forward(self, x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Transform the hidden states [B, S, H]."""
        narrow = self.reduce_norm(self.reduce(x))
        attended = self.attention(self.shared_norm(self.shared(x)), mask, bias, x)
        narrow = self.attention_norm(attended + narrow)
        for network in self.networks:
            narrow = network(narrow)
        return self.output_norm(self.expand(narrow) + x)  # type: ignore[no-any-return]

    def write(self, trunk: TrunkGraph, name: str, x: str, bias: str = "") -> str:
        """Write the layer: hidden states -> hidden states; see `TrunkGraph.attend`."""
        ops = trunk.linear_ops
        entering = ops.prepare_input(x, f"{name}.reduce", self.reduce.in_features)
        narrow = ops.matmul(entering, f"{name}.reduce", self.reduce)
        norm = f"{name}.reduce_norm"
        narrow = self.reduce_norm.write(trunk, norm, [narrow], self.reduce.bias)
        shared = ops.matmul(entering, f"{name}.shared", self.shared)
        norm = f"{name}.shared_norm"
        shared = self.shared_norm.write(trunk, norm, [shared], self.shared.bias)
        attended, attended_bias = self.attention.write(
            trunk, f"{name}.attention", shared, bias, entering
        )
        norm, terms = f"{name}.attention_norm", [attended, trunk.kept(narrow)]
        narrow = self.attention_norm.write(trunk, norm, terms, attended_bias)
        for part, network in self._networks():
            narrow = network.write(trunk, f"{name}.{part}", narrow)
        entering = ops.prepare_input(narrow, f"{name}.expand", self.expand.in_features)
        expanded = ops.matmul(entering, f"{name}.expand", self.expand)
        norm, terms = f"{name}.output_norm", [expanded, trunk.kept(x)]
        return self.output_norm.write(trunk, norm, terms, self.expand.bias)


def bottleneck_encoder(config: EncoderConfig) -> Encoder:
    """Return the encoder of Sun et al. 2020."""
    return Encoder(
        TrigramEmbeddings(config), (BottleneckLayer(config) for _ in range(config.layers))
    )
