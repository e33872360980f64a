"""The matrix products of a block, over which calibration, rounding and int8 iterate."""

from enum import Enum, auto
from typing import NamedTuple

from torch import nn


class InputKind(Enum):
    """Where the input of a product comes from, which decides how int8 quantises the input."""

    NORM = auto()
    """A LayerNorm: a few channels are many times larger than the others."""

    ATTENTION = auto()
    """A mean of values, hence without outliers."""

    ACTIVATION = auto()
    """An activation function: the largest number differs much between tokens."""


class ProductGroup(NamedTuple):
    """Linear layers that multiply the same input."""

    linears: tuple[nn.Linear, ...]
    input: InputKind
