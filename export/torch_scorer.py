"""Runs torch models for evaluation and verification."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cloze.export.heads import EXPORT_HEADS
from cloze.export.model import Model, head_module
from cloze.export.sentence import EmbeddingRecipe
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs, requests_of
from cloze.model_store.heads import HEADS, GraphSpec
from cloze.model_store.layouts import Layout


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
        ids, types = (
            torch.from_numpy(np.stack(rows).astype(np.int64)).to(self._device)
            for rows in ([e.input_ids for e in batch], [e.token_type_ids for e in batch])
        )
        states = self._model.encoder.states(ids, types).flatten(1, 2)
        outputs = torch_outputs(self._model, self._recipe, states, batch, self._codec)
        return self._codec.unpack(batch, outputs)


def torch_outputs(
    model: Model,
    recipe: EmbeddingRecipe,
    states: torch.Tensor,
    batch: Sequence[Encoding],
    codec: BatchCodec,
) -> dict[str, NDArray[Any]]:
    """Return the outputs that a graph should compute for a batch, by output name."""
    placement = codec.placement(batch)
    outputs: dict[str, NDArray[Any]] = {}
    for name in codec.head_names:
        export_head = EXPORT_HEADS[name]
        module = head_module(model, recipe, name)
        if module is None:
            continue
        requests = requests_of(batch, export_head.head)
        reference = export_head.reference(module, states, requests, placement)
        outputs |= {output: values.cpu().numpy() for output, values in reference.items()}
    return outputs
