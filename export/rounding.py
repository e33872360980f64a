"""Rounds the weights of a model to the numbers that a bundle stores."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from cloze.export.blocks.encoder import Encoder
from cloze.export.errors import ExportError
from cloze.export.graph.linear_ops import InputScale, quantise
from cloze.export.model import Model
from cloze.export.sentence import EmbeddingRecipe
from cloze.model_store.manifest import Weights


def round_weights(
    model: Model, recipe: EmbeddingRecipe, weights: Weights, scales: Mapping[str, InputScale]
) -> None:
    """Round every matrix, in place, to the nearest values that ``weights`` can store.

    Torch then computes with the numbers that the graph stores.

    Args:
        weights: the storage of matrices. With int8, matrices outside the encoder are stored as
            fp16.

    Raises:
        ExportError: a weight is too large for fp16.
    """
    if weights is Weights.FP32:
        return
    integers = set[Tensor]()
    if weights is Weights.INT8:
        integers = round_to_int8(model.encoder, scales)
    for module in (model, *recipe.projections):
        _round_to_fp16(module, integers)


@torch.no_grad()
def _round_to_fp16(module: nn.Module, integers: Collection[Tensor]) -> None:
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1 and parameter not in integers:
            rounded = parameter.half().float()
            if not rounded.isfinite().all():
                largest = float(parameter.abs().max())
                raise ExportError(
                    f"{name} holds {largest:.3g}, which fp16 cannot; use fp32 weights"
                )
            parameter.copy_(rounded)


@torch.no_grad()
def round_to_int8(encoder: Encoder, scales: Mapping[str, InputScale]) -> set[Tensor]:
    """Round an encoder's matrices and word embeddings in place to the values of their integers.

    Returns:
        The rounded matrices.
    """
    rounded: set[Tensor] = set()
    for name, group in encoder.products().items():
        factors = scales[name].factors if name in scales else None
        for linear in group.linears:
            weight = linear.weight
            weight.copy_(
                _rounded(weight) if factors is None else _rounded(weight * factors) / factors
            )
            rounded.add(weight)
    words = encoder.embeddings.word.weight
    words.copy_(_rounded(words))
    return rounded | {words}


def _rounded(weight: Tensor) -> Tensor:
    integers, steps = quantise(weight)
    return integers * steps[:, None]
