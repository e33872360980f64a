"""An encoder with the heads it has: the one torch module that checkpoints load into and graphs are written from."""

from collections.abc import Iterable

from torch import Tensor, nn

from export.models.config import EncoderConfig
from export.models.encoder import Encoder
from export.models.heads import Head, MaskedLMHead, NextSentenceHead, SpanHead


class Model(nn.Module):
    """BERT or DistilBERT; a head that was not asked for is None.

    Args:
        config: the sizes.
        heads: which heads to have.
    """

    def __init__(self, config: EncoderConfig, heads: Iterable[Head] = ()) -> None:
        super().__init__()
        heads = frozenset(heads)
        self.config = config
        self.encoder = Encoder(config)
        self.masked_lm = MaskedLMHead(config, self.encoder.embeddings.word) if Head.MASKED_LM in heads else None
        self.next_sentence = NextSentenceHead(config) if Head.NEXT_SENTENCE in heads else None
        self.span = SpanHead(config) if Head.SPAN in heads else None

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        first_positions: Tensor | None = None,
    ) -> Tensor:
        """As `Encoder.forward`: hidden states [B, S, H]. Heads are called on the rows one wants."""
        return self.encoder(input_ids, token_type_ids, attention_mask, first_positions)  # type: ignore[no-any-return]

    def parameter_count(self) -> int:
        """Parameters of the encoder and the heads, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
