"""What stands on the trunk: the three heads of the paper's tasks. Each takes rows of hidden states [R, H]."""

from enum import StrEnum

from torch import Tensor, nn

from export.models.activations import ACTIVATIONS
from export.models.config import EncoderConfig


class Head(StrEnum):
    """The heads, by their attribute in `Model`."""

    MASKED_LM = "masked_lm"
    NEXT_SENTENCE = "next_sentence"
    SPAN = "span"


class MaskedLMHead(nn.Module):
    """Transform, then the product with the word embeddings, tied (Devlin et al. 2019, section 3.1, task 1)."""

    def __init__(self, config: EncoderConfig, word: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = word.weight

    def forward(self, rows: Tensor) -> Tensor:
        """``rows`` [M, H] -> logits [M, V]."""
        return self.decoder(self.norm(self.activation(self.transform(rows))))  # type: ignore[no-any-return]


class NextSentenceHead(nn.Module):
    """The pooler (a tanh layer on ``[CLS]``) and two logits: "is next", "is not" (section 3.1, task 2)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, rows: Tensor) -> Tensor:
        """``rows`` [P, H], the hidden states of ``[CLS]`` -> logits [P, 2]."""
        return self.classifier(self.pooler(rows).tanh())  # type: ignore[no-any-return]


class SpanHead(nn.Module):
    """Start and end logits of an answer's span for each token (section 4.2)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, rows: Tensor) -> Tensor:
        """``rows`` [T, H] -> logits [T, 2]."""
        return self.classifier(rows)  # type: ignore[no-any-return]
