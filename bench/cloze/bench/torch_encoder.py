"""Runs the same encoder in torch on sequences of different lengths.

The variants use `scaled_dot_product_attention` on padded batches, compiled or not, or on nested
tensors without padding.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from cloze.export.blocks.encoder import Encoder
from cloze.export.blocks.layer import Layer, SelfAttention
from cloze.export.model import Model


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch on the device: B sequences of at most S tokens, T tokens in total.

    Attributes:
        input_ids: int32 [B, S] padded, or [T] without padding.
        mask: bool [B, S], true at real tokens; None if no sequence is padded.
        offsets: int64 [B + 1], the first token of each sequence, then T.
        longest: S.
    """

    input_ids: Tensor
    mask: Tensor | None
    offsets: Tensor
    longest: int


class TorchEncoder:
    """Mean-pooled embeddings in torch, in fp16 on a GPU and fp32 on a CPU.

    Args:
        model: the weights; changed in place.
        nested: run a batch as one nested tensor without padding; else pad every sequence to the
            longest of its batch.
    """

    def __init__(
        self, model: Model, device: torch.device, *, nested: bool = False, compiled: bool = False
    ) -> None:
        self._device, self._nested = device, nested
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        encoder = model.encoder.eval().requires_grad_(False).to(device, dtype)
        mean_pooled = _embed_nested if nested else _embed_padded
        if nested:
            warnings.filterwarnings(
                "ignore", message="The PyTorch API of nested tensors is in prototype stage"
            )

        def embed(batch: Prepared) -> Tensor:
            return mean_pooled(encoder, batch)

        # Without this flag, torch continues uncompiled after some shapes, without a message.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        self._embed: Callable[[Prepared], Tensor] = (
            torch.compile(embed, dynamic=True) if compiled else embed
        )

    def prepare(self, sequences: Sequence[NDArray[np.int32]]) -> Prepared:
        """Copy a batch to the device."""
        lengths = [len(sequence) for sequence in sequences]
        offsets = torch.tensor(np.cumsum([0, *lengths]), device=self._device)
        if self._nested:
            packed_ids = torch.from_numpy(np.concatenate(sequences)).to(self._device)
            return Prepared(packed_ids, None, offsets, max(lengths))
        ids = np.zeros((len(sequences), max(lengths)), np.int32)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = sequence
        mask = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
        on_device = None if mask.all() else torch.from_numpy(mask).to(self._device)
        return Prepared(torch.from_numpy(ids).to(self._device), on_device, offsets, max(lengths))

    @torch.inference_mode()
    def run(self, batches: Sequence[Prepared]) -> list[NDArray[np.float32]]:
        """Return the embeddings [B, H] float32 of each batch.

        All batches are queued before the first result is copied to the host.
        """
        return [
            embeddings.cpu().numpy() for embeddings in [self._embed(batch) for batch in batches]
        ]


def _embed_padded(encoder: Encoder, batch: Prepared) -> Tensor:
    hidden = encoder.states(batch.input_ids, None, batch.mask)[-1]  # [B, S, H]
    if batch.mask is None:
        return hidden.mean(1, dtype=torch.float32)
    weights = batch.mask / batch.mask.sum(1, keepdim=True)  # [B, S] float32
    return (weights[:, None] @ hidden.float())[:, 0]


def _embed_nested(encoder: Encoder, batch: Prepared) -> Tensor:
    embeddings, offsets = encoder.embeddings, batch.offsets
    lengths = offsets.diff()
    # [T], the sequence of each token
    sequence = torch.repeat_interleave(lengths, output_size=len(batch.input_ids))
    positions = torch.arange(len(batch.input_ids), device=offsets.device) - offsets[sequence]
    x = embeddings.word(batch.input_ids)
    if embeddings.position is not None:
        x = x + embeddings.position(positions)
    if embeddings.token_type is not None:
        x = x + embeddings.token_type.weight[0]
    x = embeddings.norm(x)  # [T, H]
    for layer in encoder.layers:
        assert isinstance(layer, Layer)
        x = layer.attention_norm(x + _attend(layer.attention, x, batch))
        x = layer.output_norm(x + layer.down(layer.activation.forward(layer.up(x))))
    sums = torch.zeros(len(lengths), x.shape[1], device=x.device).index_add_(0, sequence, x.float())
    return sums / lengths[:, None]


def _attend(attention: SelfAttention, x: Tensor, batch: Prepared) -> Tensor:
    def split(rows: Tensor) -> Tensor:
        jagged = nested_tensor_from_jagged(
            rows.view(len(rows), attention.heads, -1),
            batch.offsets,
            min_seqlen=1,
            max_seqlen=batch.longest,
        )
        return jagged.transpose(1, 2)  # [B, N, lengths, H / N]

    query, key, value = (
        split(linear(x)) for linear in (attention.query, attention.key, attention.value)
    )
    context = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    return attention.output(context.values().flatten(1))  # type: ignore[no-any-return]
