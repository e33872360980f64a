"""Rounds weights to the numbers that a bundle stores, and computes the scales of int8 inputs.

In every text, a few channels of LayerNorm's output are many times larger than the others. With one
scale per token, the other channels then use few of the 127 steps. Smoothing divides channel j by
``(largest |x_j|)^alpha / (largest |w_j|)^(1 - alpha)`` and multiplies the weights by the same
factor (Xiao et al. 2023, "SmoothQuant", equation 4, with alpha 0.75).

Random tokens between [CLS] and [SEP], of which 15 % are [MASK], give the factors of LayerNorm's
outputs. They also give the step of each smoothed input, and of attention's output, for all tokens:
to find a step per token takes several passes over the activations. The second matrix of the
feed-forward network keeps a step per token. docs/decisions/0006-int8.md has the measurements.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cloze.export.blocks.encoder import Encoder
from cloze.export.blocks.layer import InputKind
from cloze.export.graph.linear_ops import LARGEST_INT8, InputScale, quantise, to_fp16
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.model import Model
from cloze.model_store.manifest import Weights

_SEQUENCES, _TOKENS = 32, 64
_MASKED = 0.15
"""Share of [MASK]: its activations are unlike those of other tokens."""

_SMALLEST = 1e-5
_ALPHA = 0.75
"""Measured from 0.35 to 0.8: docs/decisions/0006-int8.md."""


@torch.inference_mode()
def input_scales(
    model: Model, tokenizer: CheckpointTokenizer, seed: int = 0
) -> dict[str, InputScale]:
    """Return the scales of the inputs that have one step for all tokens, by `LinearInput.name`."""
    groups = {
        name: group
        for name, group in model.encoder.products().items()
        if group.input is not InputKind.ACTIVATION
    }
    largest: dict[str, Tensor] = {}
    with _record_largest({name: group.linears[0] for name, group in groups.items()}, largest):
        tokens = min(_TOKENS, model.config.max_positions)
        model(_random_tokens(tokenizer, tokens, torch.Generator().manual_seed(seed)))
    scales = {}
    for name, group in groups.items():
        inputs = largest[name].clamp_min(_SMALLEST)
        factors = None
        if group.input is InputKind.NORM:
            weights = torch.stack([one.weight.abs().amax(0) for one in group.linears]).amax(0)
            factors = inputs**_ALPHA / weights.clamp_min(_SMALLEST) ** (1 - _ALPHA)
            inputs = inputs / factors
        scales[name] = InputScale(float(inputs.max()) / LARGEST_INT8, factors)
    return scales


def _random_tokens(
    tokenizer: CheckpointTokenizer, tokens: int, generator: torch.Generator
) -> Tensor:
    """Return sequences [_SEQUENCES, tokens] of random tokens, special where a text has them."""
    # Other rows of the word embeddings are unused.
    ids = torch.randint(tokenizer.size, (_SEQUENCES, tokens), generator=generator)
    masked = torch.rand(ids.shape, generator=generator) < _MASKED
    if tokenizer.mask_id is not None:
        ids[masked] = tokenizer.mask_id
    ids[:, 0], ids[:, -1] = tokenizer.special.cls, tokenizer.special.sep
    return ids


@contextmanager
def _record_largest(linears: dict[str, nn.Linear], largest: dict[str, Tensor]) -> Iterator[None]:
    """Record the largest absolute input of each channel in ``largest`` until the context ends."""

    def add_hook(name: str, linear: nn.Linear) -> torch.utils.hooks.RemovableHandle:
        def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            maxima = inputs[0].abs().flatten(0, -2).amax(0)
            largest[name] = torch.maximum(largest[name], maxima) if name in largest else maxima

        return linear.register_forward_pre_hook(record)

    handles = [add_hook(name, linear) for name, linear in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
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
    for module in (model, *recipe.steps):
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1 and parameter not in integers:
                parameter.copy_(to_fp16(name, parameter))


@torch.no_grad()
def round_to_int8(encoder: Encoder, scales: Mapping[str, InputScale]) -> set[Tensor]:
    """Round an encoder's matrices and words in place as int8 stores them; return the matrices."""
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
