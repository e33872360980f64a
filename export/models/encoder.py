"""The trunk that BERT and DistilBERT share: embeddings and a stack of transformer layers.

Sources: Devlin et al. 2019, "BERT"; Vaswani et al. 2017, "Attention Is All You Need", section 3
(post-norm layers).
Shapes: B sequences, S tokens each, H hidden size, N attention heads, I intermediate size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloze.export.models.activations import ACTIVATIONS
from cloze.export.models.config import EncoderConfig


class Embeddings(nn.Module):
    """The normalised sum of word, position and token type embeddings."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_positions, config.hidden_size)
        self.token_type = (
            nn.Embedding(config.type_vocab_size, config.hidden_size)
            if config.type_vocab_size
            else None
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
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
        return self.dropout(self.norm(x))  # type: ignore[no-any-return]


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

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Attend within each sequence.

        Args:
            x: [B, S, H].
            attention_mask: bool [B, S], True for real tokens; None: all tokens are real.

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
            None if attention_mask is None else attention_mask[:, None, None, :],
            self.dropout if self.training else 0.0,
        )
        return self.output(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # [B, S, H] -> [B, N, S, H / N]


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

    def linears_by_input(self) -> dict[str, tuple[nn.Linear, ...]]:
        """Return the linear layers grouped by input, under the name of each group's first layer."""
        attention = self.attention
        return {
            "query": (attention.query, attention.key, attention.value),
            "output": (attention.output,),
            "up": (self.up,),
            "down": (self.down,),
        }

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Transform the hidden states [B, S, H]."""
        x = self.attention_norm(x + self.dropout(self.attention(x, attention_mask)))
        return self.output_norm(x + self.dropout(self.down(self.activation(self.up(x)))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The encoder: token ids to hidden states."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))

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
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x

    def states(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return the embeddings and the output of each layer, [N, B, S, H]; see `forward`."""
        states = [self.embeddings(input_ids, token_type_ids)]
        for layer in self.layers:
            states.append(layer(states[-1], None))
        return torch.stack(states)
