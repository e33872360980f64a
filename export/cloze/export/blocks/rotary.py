"""Rotary positions: queries and keys are turned by angles that grow with the position.

Source: Su et al. 2021, "RoFormer", section 3.2. The product of a turned query and a turned key
depends on the distance of the two tokens, not on their positions. A bias of keys therefore does not
cancel in the softmax.
Shapes: B sequences, S tokens, N attention heads, d numbers per head, P positions.
"""

from typing import Self

import torch
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.graph.trunk import TrunkGraph


class Rotary(nn.Module):
    """The rotation of queries and keys, from tables in fp32.

    The numbers of a head are pairs: number k and number k + d / 2 ("rotate half"). The pair k is
    turned by ``position * base ** (-2 k / d)``.

    With ``factor`` f, the frequencies are ``(base * f) ** (-2 k / d) / f ** (2 / d)``, so that the
    slowest is f times slower and the fastest nearly unchanged ("NTK-aware" scaling; Peng et al.
    2023, "YaRN", section 3.1).

    Args:
        width: d, an even number.
        positions: P, the longest sequence; a longer one is an error.
        base: the base of the frequencies.
        factor: f; 1 leaves the frequencies unchanged.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, positions: int, base: float, *, factor: float = 1.0) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"rotary positions need an even number per head, got {width}")
        self.width = width
        # On the CPU even while a model is built without memory: the tables are not loaded.
        exponents = torch.arange(0, width, 2, device="cpu").float() / width
        frequencies = 1.0 / (base * factor) ** exponents / factor ** (2 / width)
        angles = torch.arange(positions, device="cpu").float()[:, None] * frequencies  # [P, d / 2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.name = f"rotary.{base:g}" + ("" if factor == 1 else f".{factor:g}")

    @classmethod
    def of(cls, config: EncoderConfig, base: float) -> Self:
        """Return the rotation of an encoder's heads."""
        return cls(config.head_size, config.max_positions, base, factor=config.rotary_factor)

    def forward(self, x: Tensor) -> Tensor:
        """Turn queries or keys [B, N, S, d]; the first token has position 0.

        Raises:
            IndexError: the sequences are longer than the tables.
        """
        tokens, positions = x.shape[2], len(self.cos)
        if tokens > positions:
            raise IndexError(f"{tokens} tokens are more than the {positions} rotary positions")
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        one, other = x.chunk(2, -1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)

    def write(self, trunk: TrunkGraph, x: str, heads: int) -> str:
        """Write the rotation of queries or keys, in the layout's shape."""
        tables = [
            trunk.linear_ops.constant(f"{self.name}.{name}", table)
            for name, table in (("cos", self.cos), ("sin", self.sin))
        ]
        return trunk.rotate(x, tables, num_heads=heads, rotary_embedding_dim=self.width)
