"""The sizes of an encoder, and the description of a model family. Does not depend on torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as validated

from cloze.model_store.limits import MAX_LAYERS, MAX_POSITIONS, MAX_VOCABULARY, MAX_WIDTH


@validated(frozen=True, slots=True)
class EncoderConfig:
    """The sizes of an encoder. The constructor validates every size.

    ``type_vocab_size`` is 0 for a family without token types. ``activation`` is a key of
    `activations.ACTIVATIONS`.

    Raises:
        pydantic.ValidationError: a size is not a number or exceeds its limits.
    """

    family: str
    vocab_size: Annotated[int, Field(gt=0, le=MAX_VOCABULARY)]
    hidden_size: Annotated[int, Field(gt=0, le=MAX_WIDTH)]
    layers: Annotated[int, Field(gt=0, le=MAX_LAYERS)]
    heads: Annotated[int, Field(gt=0, le=MAX_WIDTH)]
    intermediate_size: Annotated[int, Field(gt=0, le=MAX_WIDTH)]
    max_positions: Annotated[int, Field(gt=2, le=MAX_POSITIONS)]
    type_vocab_size: Annotated[int, Field(ge=0, le=MAX_WIDTH)]
    activation: str = "gelu"
    layer_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-12
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden size {self.hidden_size} is not a multiple of the {self.heads} "
                "attention heads"
            )
        return self


@dataclass(frozen=True, slots=True)
class Family:
    """The mapping from one family's checkpoints to our modules.

    Attributes:
        name: the family's ``model_type`` in ``config.json``.
        read_config: ``config.json`` -> sizes; raises ``KeyError`` for a missing size and
            ``ValueError`` for an unsupported setting.
        write_config: sizes -> the ``config.json`` from which `read_config` reads these sizes.
        prefix: the first part of tensor names when the encoder is part of a larger module.
        names: the encoder's tensor names in a checkpoint -> our names. ``*`` stands for the number
            of a layer, ``{p}`` for ``weight`` or ``bias``. Reading uses the first match, writing
            the last match.
        heads: tensor names in a checkpoint -> our names without the head's name, by head name,
            for heads whose names in this family differ from `ExportHead.tensor_names`.
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], EncoderConfig]
    write_config: Callable[[EncoderConfig], dict[str, Any]]
    prefix: str
    names: Mapping[str, str]
    heads: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def rename(self, tensor: str, heads: Mapping[str, Mapping[str, str]]) -> list[str]:
        """Return our names of a checkpoint's tensor; none if our modules lack the tensor.

        Args:
            tensor: the tensor's name in the checkpoint.
            heads: tensor names of each head, see `Family.heads`. Two heads may share a tensor.
        """
        name = tensor.removeprefix(self.prefix)
        name = name.replace(".gamma", ".weight").replace(".beta", ".bias")
        ours = _first_match(name, self.names)
        if ours is not None:
            return [ours]
        return [
            f"{head}.{new}"
            for head, names in heads.items()
            if (new := _first_match(name, names)) is not None
        ]

    def original_name(self, tensor: str, heads: Mapping[str, Mapping[str, str]]) -> str:
        """Return the name of one of our tensors in a checkpoint of this family.

        Args:
            tensor: our name of the tensor.
            heads: tensor names of each head, see `Family.heads`.
        """
        head, _, rest = tensor.partition(".")
        if head in heads:
            names = _originals(rest, heads[head])
            # The pooler is part of the encoder's module in transformers; other heads are not.
            prefix = self.prefix if names[-1].startswith("pooler.") else ""
            return prefix + names[-1]
        names = _originals(tensor, self.names)
        assert names, f"a {self.name} has no tensor {tensor}"
        return self.prefix + names[-1]


def _first_match(name: str, names: Mapping[str, str]) -> str | None:
    translated = (_translate(name, theirs, ours) for theirs, ours in names.items())
    return next((new for new in translated if new), None)


def _originals(tensor: str, names: Mapping[str, str]) -> list[str]:
    translated = (_translate(tensor, ours, theirs) for theirs, ours in names.items())
    return [name for name in translated if name]


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        re.escape(name).replace(r"\*", r"(?P<layer>\d+)").replace(r"\{p\}", "(?P<p>weight|bias)")
    )


def _translate(name: str, old: str, new: str) -> str | None:
    """Return ``name`` in the form of ``new`` if the name has the form of ``old``, else None."""
    match = _pattern(old).fullmatch(name)
    return match and match.expand(new.replace("*", r"\g<layer>").replace("{p}", r"\g<p>"))
