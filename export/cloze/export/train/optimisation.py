"""The optimiser, the learning rate schedule, and the average of the last weights."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cloze.export.train.recipe import Optimisation

_EMBEDDINGS = ".embeddings."
_ENCODER = re.compile(
    r"\.(encoder|embeddings|embeddings_project|layers|transformer|emb_norm|final_norm)\."
)
"""Parts of the names of an encoder's parameters, in transformers' classes; others are of heads."""


def make_optimizer(module: nn.Module, recipe: Optimisation) -> torch.optim.AdamW:
    """Return AdamW over the parameters of a module, grouped by weight decay and learning rate.

    AdamW decays matrices only (Loshchilov & Hutter 2019), not biases and LayerNorm. Each group has
    its own ``peak_learning_rate``.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in _learnt(module).items():
        decay = recipe.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((decay, _peak_learning_rate(name, recipe)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": decay, "lr": peak, "peak_learning_rate": peak}
            for (decay, peak), parameters in groups.items()
        ],
        betas=(0.9, recipe.beta2),
        eps=1e-6,
        fused=True,
    )


def optimizer_step(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Update the weights at ``factor`` times the peak rates, and drop the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_learning_rate"] * factor
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _peak_learning_rate(name: str, recipe: Optimisation) -> float:
    """Return the peak learning rate of a parameter by its name.

    A decoder whose weights are tied to the word embeddings has the rate of the embeddings.
    """
    if recipe.embedding_learning_rate is not None and _EMBEDDINGS in f".{name}":
        return recipe.embedding_learning_rate
    if recipe.head_learning_rate is not None and not _ENCODER.search(f".{name}"):
        return recipe.head_learning_rate
    return recipe.learning_rate


def schedule_factor(step: int, steps: int, recipe: Optimisation) -> float:
    """Return the share of the peak learning rate at the 0-based ``step``.

    The share rises linearly from 0 over the warm-up, is constant, and then falls linearly to 0
    over the decay (Hu et al. 2024, "MiniCPM", section 4.2).
    """
    warmup = recipe.warmup * steps
    if step + 1 < warmup:
        return (step + 1) / warmup
    decay = steps - warmup if recipe.decay is None else recipe.decay * steps
    return min(1.0, max(steps - step, 1) / max(decay, 1))


def learning_rate(step: int, steps: int, recipe: Optimisation) -> float:
    """Return the learning rate at the 0-based ``step`` for parameters without their own rate."""
    return recipe.learning_rate * schedule_factor(step, steps, recipe)


def _learnt(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not frozen, by name."""
    return {name: one for name, one in module.named_parameters() if one.requires_grad}


class BestWeights:
    """The weights of a module at its best evaluation.

    Args:
        patience: evaluations without a better one after which a run is over; 0: none is kept.
    """

    def __init__(self, module: nn.Module, patience: int) -> None:
        self._parameters = _learnt(module)
        self._patience = patience
        self._weights: dict[str, Tensor] = {}
        self._figure, self._worse = -math.inf, 0
        self.step = 0
        """The number of steps before the best evaluation; 0 before the first evaluation."""

    @property
    def is_over(self) -> bool:
        """Whether so many evaluations were no better than the best."""
        return 0 < self._patience <= self._worse

    @torch.no_grad()
    def offer(self, step: int, figure: float) -> None:
        """Keep the weights if the figure is higher than all before."""
        self._worse += 1
        if figure > self._figure:
            self.step, self._figure, self._worse = step, figure, 0
            self._weights = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def apply(self) -> None:
        """Set the best weights, if any were kept."""
        for name, weights in self._weights.items():
            self._parameters[name].copy_(weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the best evaluation, and its weights by name."""
        names = ("_weights", "_figure", "_worse", "step")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)


class WeightAverage:
    """The mean of a module's weights over the last steps of a run.

    Sources: Izmailov et al. 2018, "SWA"; Kaddour 2022, "LAWA".

    Args:
        first_step: 0-based step after which the first weights are counted.
    """

    def __init__(self, module: nn.Module, first_step: int) -> None:
        self._parameters = _learnt(module)
        self._first_step = first_step
        self._means: dict[str, Tensor] = {}
        self.count = 0

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Count the weights after the 0-based ``step``."""
        if step < self._first_step:
            return
        self.count += 1
        for name, parameter in self._parameters.items():
            if self.count == 1:
                self._means[name] = parameter.detach().clone()
            else:
                self._means[name].lerp_(parameter, 1 / self.count)

    @torch.no_grad()
    def _swap(self) -> None:
        for name, mean in self._means.items():
            weights = self._parameters[name].detach().clone()
            self._parameters[name].copy_(mean)
            mean.copy_(weights)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the averaged weights inside a ``with`` block, and restore the last weights after."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def apply(self) -> None:
        """Set the averaged weights, if any weights were counted."""
        self._swap()

    def state_dict(self) -> dict[str, Any]:
        """Return the count, and the means by name."""
        return {"count": self.count, "means": self._means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self.count, self._means = int(state["count"]), dict(state["means"])
