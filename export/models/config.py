"""Sizes of an encoder, and what a family of checkpoints says about itself. Knows no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Everything that shapes the modules.

    ``type_vocab_size`` is 0 for a family without token types. ``activation`` is a key of `activations.ACTIVATIONS`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    max_positions: int
    type_vocab_size: int
    activation: str = "gelu"
    layer_norm_eps: float = 1e-12
    dropout: float = 0.1
    pad_id: int = 0

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden size {self.hidden_size} is not a multiple of the {self.heads} attention heads")


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture's checkpoints map onto our modules.

    Attributes:
        name: the ``model_type`` of its ``config.json``.
        read_config: ``config.json`` -> sizes; raises ``KeyError`` on a missing size, ``ValueError`` on an
            unsupported setting.
        prefix: what tensor names may start with when the encoder is part of a larger module.
        renames: (pattern, replacement) of a checkpoint's tensor name, the first full match wins.
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], EncoderConfig]
    prefix: str
    renames: tuple[tuple[re.Pattern[str], str], ...]

    def rename(self, tensor: str) -> str | None:
        """Our name of a checkpoint's tensor, or None if none of our modules has it."""
        name = tensor.removeprefix(self.prefix).replace(".gamma", ".weight").replace(".beta", ".bias")
        for pattern, replacement in self.renames:
            if match := pattern.fullmatch(name):
                return match.expand(replacement)
        return None


def renames(table: Mapping[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Compile a table of names: ``*`` stands for a layer's number, ``{p}`` for ``weight`` or ``bias``."""
    return tuple(
        (
            re.compile(re.escape(theirs).replace(r"\*", r"(?P<layer>\d+)").replace(r"\{p\}", "(?P<p>weight|bias)")),
            ours.replace("*", r"\g<layer>").replace("{p}", r"\g<p>"),
        )
        for theirs, ours in table.items()
    )
