"""The importance of heads and neurons on data, which of them stay, and the model without the rest.

Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 4: the expected
absolute derivative of the loss by a gate of 1 on each part, in units of each layer's norm.
Shapes: B sequences of S tokens, L layers, N attention heads, F neurons.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from cloze.export.blocks.layer import Layer
from cloze.export.model import Model
from cloze.export.train.batches import TextBatch
from cloze.export.train.objectives import masked_loss

_NEURONS = 16
"""Neurons are kept in groups of so many, the width of a vector instruction."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A number per head [N] and per neuron [F] of a layer: its gate, importance, or place."""

    heads: Tensor
    neurons: Tensor


def layers_of(model: Model) -> list[Layer]:
    """Return the layers of a model that can be pruned."""
    return [cast(Layer, layer) for layer in model.encoder.layers]


@contextmanager
def gated(model: Model, gates: Sequence[LayerParts]) -> Iterator[None]:
    """Multiply the output of each head and neuron by its gate.

    Args:
        gates: per layer; [N] and [F], or [B, N] and [B, F] for gates of each sequence.
    """
    hooks = []
    for layer, gate in zip(layers_of(model), gates, strict=True):
        size = layer.attention.output.in_features // layer.attention.heads
        heads = gate.heads.repeat_interleave(size, -1)
        for linear, values in ((layer.attention.output, heads), (layer.down, gate.neurons)):
            factor = values[:, None] if values.ndim == 2 else values
            hooks.append(linear.register_forward_pre_hook(partial(_multiply, factor)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _multiply(factor: Tensor, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
    return (inputs[0] * factor,)


def importance(model: Model, batches: Iterable[TextBatch]) -> list[LayerParts]:
    """Return the importance of each head and neuron, per layer.

    The sum over the sequences of the absolute derivative of the masked-LM loss by the gates.
    """
    assert model.masked_lm is not None
    model.eval()
    totals = [
        LayerParts(torch.zeros(layer.attention.heads), torch.zeros(layer.down.in_features))
        for layer in layers_of(model)
    ]
    for batch in batches:
        rows = len(batch.input_ids)
        gates = [
            LayerParts(*(_gate(rows, total).to(batch.input_ids.device) for total in _both(layer)))
            for layer in totals
        ]
        with torch.enable_grad(), gated(model, gates):
            hidden = model(batch.input_ids, batch.token_type_ids, batch.attention_mask)
            logits = model.masked_lm(hidden.flatten(0, 1)[batch.positions])
            loss, _ = masked_loss(logits, batch.labels)
            wanted = [gate for layer in gates for gate in _both(layer)]
            gradients = iter(torch.autograd.grad(loss, wanted))
        for layer in totals:
            for total in _both(layer):
                total += next(gradients).abs().sum(0).cpu()
    return totals


def _gate(rows: int, total: Tensor) -> Tensor:
    return torch.ones(rows, len(total), requires_grad=True)


def _both(parts: LayerParts) -> tuple[Tensor, Tensor]:
    return parts.heads, parts.neurons


def choose(scores: Sequence[LayerParts], heads: int, neurons: int) -> list[LayerParts]:
    """Return the places of the parts to keep, in ascending order, per layer.

    Args:
        heads: number of heads to keep in the model, at least one per layer.
        neurons: number of neurons to keep; each layer's number is rounded to groups.
    """
    kept_heads = _most_important([layer.heads for layer in scores], heads, 1)
    kept_neurons = _most_important([layer.neurons for layer in scores], neurons, _NEURONS)
    return [LayerParts(*places) for places in zip(kept_heads, kept_neurons, strict=True)]


def _most_important(scores: Sequence[Tensor], count: int, group: int) -> list[Tensor]:
    """Return the places of the ``count`` largest numbers, at least one group per layer."""
    scaled = [score / score.norm().clamp_min(1e-30) for score in scores]
    best = torch.cat(scaled).argsort(descending=True, stable=True)[:count]
    layer_of = torch.cat([torch.full((len(s),), layer) for layer, s in enumerate(scores)])
    counts = torch.bincount(layer_of[best], minlength=len(scores)).tolist()
    places = []
    for score, number in zip(scaled, counts, strict=True):
        rounded = max(group, round(number / group) * group)
        order = score.argsort(descending=True, stable=True)
        places.append(order[:rounded].sort().values)
    return places


@torch.no_grad()
def without_others(model: Model, kept: Sequence[LayerParts], dropout: float) -> Model:
    """Return a copy of a model that has these heads and neurons only."""
    config = replace(
        model.config,
        layer_heads=tuple(len(layer.heads) for layer in kept),
        layer_intermediate_sizes=tuple(len(layer.neurons) for layer in kept),
        dropout=dropout,
    )
    heads = [name for name, module in model.named_children() if name != "encoder"]
    smaller = Model(config, heads, model.options)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    size = model.config.head_size
    for number, places in enumerate(kept):
        rows = (places.heads[:, None] * size + torch.arange(size)).flatten()
        prefix = f"encoder.layers.{number}."
        for names, chosen in (
            (("attention.query", "attention.key", "attention.value"), rows),
            (("up", "gate"), places.neurons),
        ):
            for name in names:
                for kind in ("weight", "bias"):
                    if (key := f"{prefix}{name}.{kind}") in weights:
                        weights[key] = weights[key][chosen]
        for name, chosen in (("attention.output", rows), ("down", places.neurons)):
            weights[f"{prefix}{name}.weight"] = weights[f"{prefix}{name}.weight"][:, chosen]
    smaller.load_state_dict(weights)
    return smaller
