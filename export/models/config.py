"""Sizes of an encoder, and what a family of checkpoints says about itself. Knows no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
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
        write_config: sizes -> the ``config.json`` that `read_config` reads as those.
        names: a checkpoint's tensor names -> ours; ``*`` stands for a layer's number, ``{p}`` for ``weight`` or ``bias``.
            The first match wins on reading, the last on writing.
        outside: how the tensor names begin that never carry the prefix, since they are no part of the encoder's module.
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], EncoderConfig]
    write_config: Callable[[EncoderConfig], dict[str, Any]]
    prefix: str
    names: Mapping[str, str]
    outside: tuple[str, ...]

    def rename(self, tensor: str) -> str | None:
        """Our name of a checkpoint's tensor, or None if none of our modules has it."""
        name = tensor.removeprefix(self.prefix).replace(".gamma", ".weight").replace(".beta", ".bias")
        return next((new for theirs, ours in self.names.items() if (new := _translate(name, theirs, ours))), None)

    def original_name(self, tensor: str) -> str:
        """What a checkpoint of this family calls a tensor of ours."""
        found = [name for theirs, ours in self.names.items() if (name := _translate(tensor, ours, theirs))]
        assert found, f"{tensor} is no tensor of a {self.name}"
        return found[-1] if found[-1].startswith(self.outside) else self.prefix + found[-1]


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"(?P<layer>\d+)").replace(r"\{p\}", "(?P<p>weight|bias)"))


def _translate(name: str, old: str, new: str) -> str | None:
    """``name`` in the form of ``new`` if it has that of ``old``."""
    match = _pattern(old).fullmatch(name)
    return match and match.expand(new.replace("*", r"\g<layer>").replace("{p}", r"\g<p>"))
