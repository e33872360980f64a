"""An encoder with its heads, the torch module between checkpoints and graphs, and its outputs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.families import FAMILIES, HeadSpec
from cloze.export.heads import EXPORT_HEADS
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.heads.head import HeadSetup
from cloze.export.heads.masked_lm import MaskedLMHead
from cloze.export.heads.next_sentence import NextSentenceHead
from cloze.export.heads.span import SpanHead
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs, PackedBatch
from cloze.model_store.heads import HEADS, GraphSpec
from cloze.model_store.layouts import Layout


class Model(nn.Module):
    """A model of any family. Each head is an attribute with its name; None: the head is absent.

    Args:
        options: options of heads, by head name, as in a manifest.
    """

    masked_lm: MaskedLMHead | None
    next_sentence: NextSentenceHead | None
    span: SpanHead | None

    def __init__(
        self,
        config: EncoderConfig,
        heads: Iterable[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        names, options, family = frozenset(heads), options or {}, FAMILIES[config.family]
        self.config = config
        self.options = {name: section for name, section in options.items() if name in names}
        self.encoder = family.encoder(config)
        for name, head in EXPORT_HEADS.items():
            if head.module is None:
                continue
            module = None
            if name in names:
                spec = family.heads.get(name, HeadSpec({}))
                module = head.module(HeadSetup(config, self.encoder, spec, options.get(name)))
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


def head_module(model: Model, recipe: EmbeddingRecipe, name: str) -> Any:
    """Return the module that a head's functions take; None if the model lacks the head.

    The functions of a head without a torch module take the recipe of embeddings.
    """
    head = EXPORT_HEADS[name]
    if head.module is None and head.module_of is None:
        return recipe
    return getattr(model, head.module_of or name)


class TorchScorer:
    """Runs a torch model in fp32.

    Args:
        recipe: the recipe of embeddings; None: mean pooling.
    """

    def __init__(
        self, model: Model, device: torch.device, recipe: EmbeddingRecipe | None = None
    ) -> None:
        self._model, self._device, self.layers = model, device, model.config.layers
        self._recipe = recipe or EmbeddingRecipe()
        graph = GraphSpec(Layout.DENSE, tuple(HEADS), token_types=True, layers=self.layers)
        self._codec = BatchCodec(graph)

    @torch.inference_mode()
    def run(self, batch: Sequence[Encoding]) -> list[HeadOutputs]:
        """Return the results of encodings of one length, in order."""
        self._model.eval()
        states = hidden_states(self._model, batch, self._device)
        packed = self._codec.pack(batch)
        outputs = torch_outputs(self._model, self._recipe, states, packed, tuple(packed.requests))
        return packed.unpack(outputs)


def hidden_states(
    model: Model, batch: Sequence[Encoding], device: torch.device | None = None
) -> Tensor:
    """Return the states [N, T, H] of encodings of one length: the embeddings, then each layer."""
    ids, types = (
        torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)
        for rows in ([e.input_ids for e in batch], [e.token_type_ids for e in batch])
    )
    return model.encoder.states(ids, types, _attention_mask(batch, device)).flatten(1, 2)


def _attention_mask(batch: Sequence[Encoding], device: torch.device | None) -> Tensor | None:
    """Return the tokens to which tokens attend, bool [B, S]; None: they attend to all tokens."""
    keys = [max((r.keys for r in e.requests.values()), default=0) or len(e) for e in batch]
    if all(count == len(encoding) for count, encoding in zip(keys, batch, strict=True)):
        return None
    positions = torch.arange(len(batch[0]), device=device)
    return positions < torch.tensor(keys, device=device)[:, None]


def torch_outputs(
    model: Model,
    recipe: EmbeddingRecipe,
    states: torch.Tensor,
    batch: PackedBatch,
    heads: Sequence[str],
) -> dict[str, NDArray[Any]]:
    """Return the outputs of heads that a graph should compute for a batch, by output name."""
    nothing = [None] * len(batch.placement.lengths)
    outputs: dict[str, NDArray[Any]] = {}
    for name in heads:
        export_head = EXPORT_HEADS[name]
        module = head_module(model, recipe, name)
        if module is None:
            continue
        requests = batch.requests.get(name, nothing)
        reference = export_head.reference(module, states, requests, batch.placement)
        outputs |= {output: values.cpu().numpy() for output, values in reference.items()}
    return outputs
