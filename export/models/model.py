"""An encoder with its heads, the torch module between checkpoints and graphs."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from cloze.export.models.config import EncoderConfig
from cloze.export.models.encoder import Encoder

if TYPE_CHECKING:
    from cloze.export.heads.masked_lm import MaskedLMHead
    from cloze.export.heads.next_sentence import NextSentenceHead
    from cloze.export.heads.span import SpanHead


class Model(nn.Module):
    """BERT or DistilBERT. Each head is an attribute with the head's name; None: the head is absent.

    Args:
        config: the sizes.
        heads: names of the model's heads.
        options: options of heads, by head name, as in a manifest.

    Attributes:
        options: the options of the model's heads.
    """

    masked_lm: "MaskedLMHead | None"
    next_sentence: "NextSentenceHead | None"
    span: "SpanHead | None"

    def __init__(
        self,
        config: EncoderConfig,
        heads: Iterable[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        from cloze.export.heads import (
            EXPORT_HEADS,  # the modules of that package import this module
        )

        super().__init__()
        names, options = frozenset(heads), options or {}
        self.config = config
        self.options = {name: section for name, section in options.items() if name in names}
        self.encoder = Encoder(config)
        for name, head in EXPORT_HEADS.items():
            if head.module is None:
                continue
            has_head = name in names
            module = head.module(config, self.encoder, options.get(name)) if has_head else None
            setattr(self, name, module)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        first_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [B, S, H]; see `Encoder.forward`."""
        hidden: Tensor = self.encoder(input_ids, token_type_ids, attention_mask, first_positions)
        return hidden

    def parameter_count(self) -> int:
        """Return the number of parameters, tied parameters counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
