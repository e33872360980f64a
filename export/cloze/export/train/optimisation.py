"""The optimiser, the learning rate schedule, and the weights that a run leaves."""

import math
import re
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
    its own peak rate, ``initial_lr``.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in _learnt(module).items():
        decay = recipe.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((decay, _peak_learning_rate(name, recipe)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": decay, "lr": peak, "initial_lr": peak}
            for (decay, peak), parameters in groups.items()
        ],
        betas=(0.9, recipe.beta2),
        eps=1e-6,
        fused=True,
    )


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


def _learnt(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not frozen, by name."""
    return {name: one for name, one in module.named_parameters() if one.requires_grad}


class KeptWeights:
    """The weights that a run leaves instead of those of its last step, if its recipe asks.

    They are the mean over the last steps (Izmailov et al. 2018, "SWA"; Kaddour 2022, "LAWA"), or
    those of the best evaluation. No recipe asks for both.

    Args:
        first_step: 0-based step after which the first weights are counted in the mean.
        patience: evaluations without a better one after which a run is over; 0: no best is kept.
    """

    def __init__(self, module: nn.Module, first_step: int, patience: int) -> None:
        self._parameters = _learnt(module)
        self._first_step, self._patience = first_step, patience
        self._weights: dict[str, Tensor] = {}
        self._best, self._worse = -math.inf, 0
        self.averaged = 0
        """The number of steps in the mean."""

        self.best_step = 0
        """The number of steps before the best evaluation; 0 before the first evaluation."""

    @property
    def is_over(self) -> bool:
        """Whether so many evaluations were no better than the best."""
        return 0 < self._patience <= self._worse

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Count the weights after the 0-based ``step`` in the mean."""
        if step < self._first_step:
            return
        self.averaged += 1
        if self.averaged == 1:
            self._copy()
        for name, mean in self._weights.items():
            mean.lerp_(self._parameters[name], 1 / self.averaged)

    @torch.no_grad()
    def offer(self, step: int, figure: float) -> None:
        """Keep the weights if the figure is higher than all before."""
        self._worse += 1
        if self._patience and figure > self._best:
            self.best_step, self._best, self._worse = step, figure, 0
            self._copy()

    def _copy(self) -> None:
        self._weights = {name: one.detach().clone() for name, one in self._parameters.items()}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the module and the kept ones, if there are any."""
        for name, kept in self._weights.items():
            last = self._parameters[name].detach().clone()
            self._parameters[name].copy_(kept)
            kept.copy_(last)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, for `load_state_dict`."""
        names = ("_weights", "_best", "_worse", "averaged", "best_step")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)
