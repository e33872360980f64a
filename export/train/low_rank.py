"""Low-rank matrices beside the frozen weights of an encoder.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloze.export.adapters import packed_layers
from cloze.export.families import FAMILIES
from cloze.export.model import Model
from cloze.export.train.recipe import LowRank, Target

_LAYERS = "encoder.layers."

_TARGETS: Final[Mapping[Target, str]] = {
    "query": r"attention\.query",
    "key": r"attention\.key",
    "value": r"attention\.value",
    "attention-output": r"attention\.output",
    "feed-forward-in": r"(networks\.\d+\.)?(up|gate)",
    "feed-forward-out": r"(networks\.\d+\.)?down",
}
"""Targets, and patterns of our names within a layer."""


class LowRankLinear(nn.Linear):
    """A linear layer whose weight W is frozen: ``x W' + b + scale (x A') B'``.

    Args:
        linear: the layer that has W and b.
        lora_a: A, [rank, inputs]; may belong to other layers too.
        scale: the factor of the product.
    """

    def __init__(self, linear: nn.Linear, lora_a: nn.Parameter, scale: float) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_a, self.scale = lora_a, scale
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, len(lora_a)))

    def forward(self, x: Tensor) -> Tensor:
        """Transform [..., inputs]."""
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_low_rank(model: Model, recipe: LowRank, heads: Collection[str]) -> None:
    """Freeze a model but for some heads, and give layers of its encoder low-rank matrices.

    Layers whose weights are one matrix in a checkpoint of the family have one A, because that is
    what PEFT learns there.

    Args:
        heads: names of the heads that are learnt.
    """
    model.requires_grad_(requires_grad=False)
    for head in heads:
        getattr(model, head).requires_grad_(requires_grad=True)
    patterns = "|".join(_TARGETS[target] for target in recipe.targets)
    pattern = re.compile(rf"{re.escape(_LAYERS)}\d+\.({patterns})")
    linears = _linears(model)
    for parts in packed_layers(model).values():
        names = [name for name in parts if pattern.fullmatch(name)]
        if not names:
            continue
        lora_a = nn.Parameter(torch.empty(recipe.rank, linears[names[0]].in_features))
        nn.init.kaiming_uniform_(lora_a, a=math.sqrt(5))
        for name in names:
            parent, _, last = name.rpartition(".")
            linear = LowRankLinear(linears[name], lora_a, recipe.alpha / recipe.rank)
            setattr(model.get_submodule(parent), last, linear)


def low_rank_matrices(model: Model) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A [rank, inputs] and B [outputs, rank] by transformers' names within its encoder.

    Layers that are packed with others and have no matrices get rows of zeros.
    """
    linears = _linears(model)
    learnt = {name: one for name, one in linears.items() if isinstance(one, LowRankLinear)}
    if not learnt:
        return {}
    rank = len(next(iter(learnt.values())).lora_a)
    rows = {
        f"{name}.weight": learnt[name].lora_b.detach()
        if name in learnt
        else torch.zeros(one.out_features, rank)
        for name, one in linears.items()
    }
    family = FAMILIES[model.config.family]
    written = family.write(rows, model.config, of_modules=True)
    matrices = {}
    for theirs, parts in packed_layers(model).items():
        if own := [learnt[part] for part in parts if part in learnt]:
            path = theirs.removeprefix(family.prefix)
            matrices[path] = (own[0].lora_a.detach(), written[f"{theirs}.weight"])
    return matrices


def _linears(model: Model) -> dict[str, nn.Linear]:
    """Return the linear layers of an encoder's layers, by name.

    A layer that stands twice has its first name.
    """
    return {
        name: one
        for name, one in model.named_modules()
        if name.startswith(_LAYERS) and isinstance(one, nn.Linear)
    }
