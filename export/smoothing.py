"""Computes the factors that smooth the encoder's activations before quantisation.

In every text, a few channels of LayerNorm's output are many times larger than the others. With one
scale per token, the other channels then use few of the 127 steps. Smoothing divides channel j by
``sqrt(largest |x_j| / largest |w_j|)`` and multiplies the weights by the same factor (Xiao et al.
2023, "SmoothQuant", equation 4, alpha 0.5).

Random tokens are enough to find the factors. Mean cosine of 200 sentences to fp32, measured on
all-MiniLM-L6-v2: 0.9974 without smoothing, 0.9990 with factors from text and from random tokens.
Nearly all of the loss comes from the value projections and the first matrix of the feed-forward
network, whose inputs are LayerNorm's outputs. Smoothing the inputs of the other two products
changed nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cloze.export.models import Model
from cloze.export.models.encoder import Layer

_AFTER_NORM = ("query", "up")
"""The products whose input is LayerNorm's output."""

_SEQUENCES, _TOKENS = 32, 64
_SMALLEST = 1e-5


@torch.inference_mode()
def smoothing_factors(model: Model, vocab_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Return the factors by which to divide LayerNorm's outputs.

    Args:
        model: the checkpoint's model.
        vocab_size: number of ids of the tokenizer; other rows of the word embeddings are unused.
        seed: the seed of the random tokens.

    Returns:
        Factors [H] float32 by the name of the first weight that the output meets in the graph.
    """
    linears_by_name = {
        f"layers.{number}.{name}": layer.linears_by_input()[name]
        for number, layer in enumerate(model.encoder.layers)
        if isinstance(layer, Layer)
        for name in _AFTER_NORM
    }
    largest: dict[str, Tensor] = {}
    with _record_largest({name: linears[0] for name, linears in linears_by_name.items()}, largest):
        tokens = min(_TOKENS, model.config.max_positions)
        generator = torch.Generator().manual_seed(seed)
        model(torch.randint(vocab_size, (_SEQUENCES, tokens), generator=generator))
    factors = {}
    for name, linears in linears_by_name.items():
        weights = torch.stack([linear.weight.abs().amax(0) for linear in linears]).amax(0)
        factors[name] = (largest[name].clamp_min(_SMALLEST) / weights.clamp_min(_SMALLEST)).sqrt()
    return factors


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
