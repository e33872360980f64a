"""The supported activations, by their names in ``config.json``."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""``gelu`` is x * Phi(x), computed with the error function.

``gelu_new`` is its tanh approximation (Hendrycks & Gimpel 2016).
"""
