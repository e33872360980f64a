"""AdamW as BERT uses it: which parameters decay, how the learning rate goes, which arithmetic is worth it."""

from contextlib import AbstractContextManager

import torch
from torch import nn

from export.train.recipe import Optimisation


def make_optimizer(module: nn.Module, recipe: Optimisation) -> torch.optim.AdamW:
    """AdamW with decoupled decay (Loshchilov & Hutter 2019) on matrices only: not on biases, not on LayerNorm."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, recipe.beta2), eps=1e-6, fused=True)


def learning_rate(step: int, steps: int, recipe: Optimisation) -> float:
    """Of the 0-based ``step``: linear from 0 over the warm-up, then linear to 0 at the end."""
    warmup = recipe.warmup * steps
    if step + 1 < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    return recipe.learning_rate * min(1.0, max(steps - step, 1) / max(steps - warmup, 1))


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """bf16 matrix products where asked for; ``auto``: where the processor has them."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16" or (precision == "auto" and _has_bf16(device)))


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
