"""Sizes of an encoder, and what a family of checkpoints says about itself. Knows no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as validated


@validated(frozen=True, slots=True)
class EncoderConfig:
    """Everything that shapes the modules. Checked when it is made: it often comes from a stranger's file.

    ``type_vocab_size`` is 0 for a family without token types. ``activation`` is a key of `activations.ACTIVATIONS`.

    Raises:
        pydantic.ValidationError: a size is no number or out of its limits.
    """

    family: str
    vocab_size: Annotated[int, Field(gt=0)]
    hidden_size: Annotated[int, Field(gt=0)]
    layers: Annotated[int, Field(gt=0)]
    heads: Annotated[int, Field(gt=0)]
    intermediate_size: Annotated[int, Field(gt=0)]
    max_positions: Annotated[int, Field(gt=2)]
    type_vocab_size: Annotated[int, Field(ge=0)]
    activation: str = "gelu"
    layer_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-12
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden size {self.hidden_size} is not a multiple of the {self.heads} attention heads")
        return self


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
