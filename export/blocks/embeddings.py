"""The embeddings of tokens: words, positions and token types (Devlin et al. 2019, section 3).

Shapes: B sequences, S tokens each, H hidden size, E embedding size.
"""

import torch
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.products import InputKind, ProductGroup
from cloze.export.graph.linear_ops import WORD_EMBEDDINGS
from cloze.export.graph.trunk import TrunkGraph
from cloze.model_store import tensors


class Embeddings(nn.Module):
    """The normalised sum of word, position and token type embeddings.

    Embeddings of another width than the hidden size are projected to it, so that the word table
    stays small (Lan et al. 2020, section 3.1).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_width
        self.word = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.max_positions, width)
        self.token_type = (
            nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        )
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.projection = nn.Linear(width, config.hidden_size) if config.embedding_size else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None,
        first_positions: Tensor | None = None,
    ) -> Tensor:
        """Embed a batch.

        Args:
            input_ids: int [B, S].
            token_type_ids: int [B, S]; None: all 0.
            first_positions: int [B], the position of each first token; None: all 0.

        Returns:
            The embeddings [B, S, H].
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        if first_positions is not None:
            positions = first_positions[:, None] + positions  # [B, S]
        x: Tensor = self.word(input_ids) + self.position(positions)
        if self.token_type is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(input_ids)
            x = x + self.token_type(token_type_ids)
        x = self.dropout(self.norm(x))
        return x if self.projection is None else self.projection(x)

    def tables(self) -> dict[str, nn.Embedding]:
        """Return the tables that the graph looks up, by the names of their weights."""
        tables = {WORD_EMBEDDINGS: self.word, tensors.POSITION_TABLE: self.position}
        return tables | ({tensors.TOKEN_TYPE_TABLE: self.token_type} if self.token_type else {})

    def products(self) -> dict[str, ProductGroup]:
        """Return the matrix products, by the name of each group's first layer."""
        if self.projection is None:
            return {}
        return {"projection": ProductGroup((self.projection,), InputKind.NORM)}

    def write(self, trunk: TrunkGraph) -> str:
        """Declare the trunk's inputs and write the embeddings.

        Do not use the fused `EmbedLayerNormalization`. Its table must be floats, and on a CPU it is
        a scalar loop: 1,046 us for 2,048 tokens of 384 numbers, where the operators here take
        700 us and convert the rows from integers as well (docs/decisions/0005).
        """
        trunk.layout.declare_inputs(trunk.g)
        input_ids = trunk.declare(tensors.INPUT_IDS)
        terms = [trunk.look_up(WORD_EMBEDDINGS, self.word.weight, input_ids)]
        if self.token_type is not None:
            type_ids = trunk.declare(tensors.TOKEN_TYPE_IDS)
            terms.append(trunk.look_up(tensors.TOKEN_TYPE_TABLE, self.token_type.weight, type_ids))
        terms.append(trunk.positions(self.position.weight))
        x = trunk.norm_of_sum(terms, "embeddings.norm", self.norm)
        if self.projection is None:
            return x
        name = "embeddings.projection"
        product = trunk.matmul(trunk.prepare(x, name), name, self.projection)
        return trunk.g.op("Add", [product, trunk.vector(f"{name}.bias", self.projection.bias)])
