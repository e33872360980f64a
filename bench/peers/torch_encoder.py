"""torch's own ways to run the same encoder on unlike lengths: `scaled_dot_product_attention`, padded, compiled, nested."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from export.models import Model
from export.models.encoder import Encoder, Layer, SelfAttention


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch on the device. Shapes: B sequences of S tokens at most, T tokens in all.

    Attributes:
        input_ids: [B, S] padded, or [T].
        mask: bool [B, S], None where nothing is padded.
        offsets: [B + 1], where each sequence starts.
        longest: S.
    """

    input_ids: Tensor
    mask: Tensor | None
    offsets: Tensor
    longest: int


class TorchEncoder:
    """Mean-pooled embeddings in torch, in fp16 on a GPU and fp32 on a CPU.

    Args:
        model: its weights; changed in place.
        device: where.
        nested: as one nested tensor, without padding; else padded to the longest of a batch.
        compiled: by `torch.compile`, for changing shapes.
    """

    def __init__(
        self, model: Model, device: torch.device, *, nested: bool = False, compiled: bool = False
    ) -> None:
        self._device, self._nested = device, nested
        encoder = (
            model.encoder.eval()
            .requires_grad_(False)
            .to(device, torch.float16 if device.type == "cuda" else torch.float32)
        )
        hidden = _nested if nested else _padded
        if nested:
            warnings.filterwarnings(
                "ignore", message="The PyTorch API of nested tensors is in prototype stage"
            )

        def embed(batch: Prepared) -> Tensor:
            return hidden(encoder, batch)

        torch._dynamo.config.fail_on_recompile_limit_hit = (
            True  # else it would go on uncompiled, and not say so
        )
        self._embed: Callable[[Prepared], Tensor] = (
            torch.compile(embed, dynamic=True) if compiled else embed
        )

    def prepare(self, sequences: Sequence[NDArray[np.int32]]) -> Prepared:
        """Copy a batch to the device."""
        lengths = [len(sequence) for sequence in sequences]
        offsets = torch.tensor(np.cumsum([0, *lengths]), device=self._device)
        if self._nested:
            return Prepared(
                torch.from_numpy(np.concatenate(sequences)).to(self._device),
                None,
                offsets,
                max(lengths),
            )
        ids = np.zeros((len(sequences), max(lengths)), np.int32)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = sequence
        mask = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
        on_device = None if mask.all() else torch.from_numpy(mask).to(self._device)
        return Prepared(torch.from_numpy(ids).to(self._device), on_device, offsets, max(lengths))

    @torch.inference_mode()
    def run(self, batches: Sequence[Prepared]) -> list[NDArray[np.float32]]:
        """Embeddings [B, H] of each batch; all are queued before the first is waited for."""
        return [
            embeddings.cpu().numpy() for embeddings in [self._embed(batch) for batch in batches]
        ]


def _padded(encoder: Encoder, batch: Prepared) -> Tensor:
    hidden = encoder(batch.input_ids, None, batch.mask)  # [B, S, H]
    if batch.mask is None:
        return hidden.mean(1, dtype=torch.float32)  # type: ignore[no-any-return]
    weights = batch.mask / batch.mask.sum(1, keepdim=True)  # [B, S] float32
    return (weights[:, None] @ hidden.float())[:, 0]  # type: ignore[no-any-return]


def _nested(encoder: Encoder, batch: Prepared) -> Tensor:
    embeddings, offsets = encoder.embeddings, batch.offsets
    lengths = offsets.diff()
    sequence = torch.repeat_interleave(
        lengths, output_size=len(batch.input_ids)
    )  # [T], of which sequence each token is
    positions = torch.arange(len(batch.input_ids), device=offsets.device) - offsets[sequence]
    x = embeddings.word(batch.input_ids) + embeddings.position(positions)
    if embeddings.token_type is not None:
        x = x + embeddings.token_type.weight[0]
    x = embeddings.norm(x)  # [T, H]
    for layer in encoder.layers:
        assert isinstance(layer, Layer)
        x = layer.attention_norm(x + _attend(layer.attention, x, batch))
        x = layer.output_norm(x + layer.down(layer.activation(layer.up(x))))
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
