"""Runs torch models for evaluation and verification."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cloze.export.heads import EXPORT_HEADS
from cloze.export.model import Model, head_module
from cloze.export.sentence import EmbeddingRecipe
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs, PackedBatch
from cloze.model_store.heads import HEADS, GraphSpec
from cloze.model_store.layouts import Layout


class TorchScorer:
    """Runs a torch model in fp32.

    Args:
        model: the model, with the requested heads.
        device: the model's device.
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
        ids, types = (
            torch.from_numpy(np.stack(rows).astype(np.int64)).to(self._device)
            for rows in ([e.input_ids for e in batch], [e.token_type_ids for e in batch])
        )
        states = self._model.encoder.states(ids, types).flatten(1, 2)
        packed = self._codec.pack(batch)
        outputs = torch_outputs(self._model, self._recipe, states, packed, tuple(packed.requests))
        return packed.unpack(outputs)


def torch_outputs(
    model: Model,
    recipe: EmbeddingRecipe,
    states: torch.Tensor,
    batch: PackedBatch,
    heads: Sequence[str],
) -> dict[str, NDArray[Any]]:
    """Return the outputs that a graph should compute for a batch, by output name.

    Args:
        model: the model, with the requested heads.
        recipe: the recipe of embeddings.
        states: the encoder's hidden states [N, T, H] of the batch, see `Encoder.states`.
        batch: the batch.
        heads: names of the heads whose outputs to compute.
    """
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
