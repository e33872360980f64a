"""Runs the same encoder in torch, on batches padded to their longest sequence."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloze.export.model import Model

Batch = tuple[Tensor, Tensor | None]
"""A batch on the device: B sequences of at most S tokens.

The first tensor has the ids, int32 [B, S]. The second one is a mask, bool [B, S], true at real
tokens; None if no sequence is padded.
"""


class TorchEncoder:
    """Mean-pooled embeddings by `scaled_dot_product_attention`, in fp16 on a GPU, fp32 on a CPU.

    Args:
        model: the weights; changed in place.
    """

    def __init__(self, model: Model, device: torch.device, *, compiled: bool = False) -> None:
        self._device = device
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        encoder = model.encoder.eval().requires_grad_(False).to(device, dtype)

        def embed(input_ids: Tensor, mask: Tensor | None) -> Tensor:
            hidden = encoder.states(input_ids, None, mask)[-1]  # [B, S, H]
            if mask is None:
                return hidden.mean(1, dtype=torch.float32)
            weights = mask / mask.sum(1, keepdim=True)  # [B, S] float32
            return (weights[:, None] @ hidden.float())[:, 0]

        # Without this flag, torch continues uncompiled after some shapes, without a message.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch.compiler.reset()  # otherwise torch stops compiling after some models, silently
        self._embed: Callable[..., Tensor] = (
            torch.compile(embed, dynamic=True) if compiled else embed
        )

    def prepare(self, sequences: Sequence[NDArray[np.int32]]) -> Batch:
        """Copy a batch to the device."""
        lengths = np.array([len(sequence) for sequence in sequences])
        ids = np.zeros((len(sequences), lengths.max()), np.int32)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = sequence
        mask = np.arange(ids.shape[1]) < lengths[:, None]
        on_device = None if mask.all() else torch.from_numpy(mask).to(self._device)
        return torch.from_numpy(ids).to(self._device), on_device

    @torch.inference_mode()
    def run(self, batches: Sequence[Batch]) -> list[NDArray[np.float32]]:
        """Return the embeddings [B, H] float32 of each batch.

        All batches are queued before the first result is copied to the host.
        """
        return [embeddings.cpu().numpy() for embeddings in [self._embed(*b) for b in batches]]
