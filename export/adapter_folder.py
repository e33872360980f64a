"""Reads an adapter in PEFT's layout: low-rank matrices and heads for an encoder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from cloze.export.checkpoint_files import read_settings, read_tensors
from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.model import Model
from cloze.model_store.error_lines import first_problem
from cloze.model_store.peft import (
    CONFIG_FILE,
    LABELS_FILE,
    NAME_PREFIX,
    TENSORS_FILE,
    AdapterError,
    check_config,
)

NO_TARGETS: Final = "dummy-target-modules"
"""PEFT's name of no module, in an adapter that has only heads."""

_CLASSES: Final = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
"""PEFT's names of tasks, and the ends of transformers' class names."""

_LAST_LAYERS: Final = ("classifier.weight", "out_proj.weight")
"""The ends of the names of the tensors with one row per label."""


class AdapterConfig(BaseModel):
    """The fields of PEFT's ``LoraConfig`` that a merge reads, and that `save_adapter` writes."""

    model_config = ConfigDict(frozen=True)

    peft_type: Literal["LORA"] = "LORA"
    task_type: str | None = None
    base_model_name_or_path: str
    revision: str | None = None
    r: int = Field(gt=0)
    lora_alpha: float = Field(gt=0)
    target_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    bias: Literal["none"] = "none"
    use_rslora: bool = False
    use_dora: Literal[False] = False
    alpha_pattern: dict[str, float] = Field(default={}, max_length=0)
    lora_dropout: float = 0.0
    inference_mode: bool = True


@dataclass(frozen=True, slots=True)
class Adapter:
    """The content of an adapter.

    Attributes:
        matrices: the name of a module of transformers -> A [rank, inputs] and B [outputs, rank].
        heads: the tensors of heads, by transformers' names.
        settings: ``config.json`` beside the adapter; empty: there is none.
    """

    config: AdapterConfig
    matrices: Mapping[str, tuple[Tensor, Tensor]]
    heads: Mapping[str, Tensor]
    settings: Mapping[str, Any]

    def head_settings(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``config.json`` of the base with the adapter's heads.

        Without settings of the adapter, labels have transformers' names: ``LABEL_0`` and so on.
        """
        if self.settings:
            return dict(self.settings)
        rows = [len(one) for name, one in self.heads.items() if name.endswith(_LAST_LAYERS)]
        labels = {str(number): f"LABEL_{number}" for number in range(rows[0] if rows else 2)}
        end = _CLASSES.get(self.config.task_type or "")
        return {**base, "id2label": labels, "architectures": [end] if end else []}


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter.

    Raises:
        ExportError: the folder is damaged or has what is not supported.
    """
    written = read_settings(folder / CONFIG_FILE)
    try:
        check_config(written)
        config = AdapterConfig.model_validate(written)
    except AdapterError as error:
        raise ExportError(str(error)) from None
    except ValidationError as error:
        raise ExportError(f"{CONFIG_FILE}: {first_problem(error)}") from None
    file = folder / TENSORS_FILE
    if not file.is_file():
        raise ExportError(f"{folder} holds no {TENSORS_FILE}")
    matrices: dict[str, dict[str, Tensor]] = {}
    heads = {}
    for name, tensor in read_tensors([file]).items():
        if not name.startswith(NAME_PREFIX):
            raise ExportError(f"{name} does not begin with {NAME_PREFIX}")
        if not torch.isfinite(tensor).all():
            raise ExportError(f"{name} holds NaN or infinity")
        path = name.removeprefix(NAME_PREFIX)
        module, found, part = path.rpartition(".lora_")
        if not found:
            heads[path] = tensor.float()
        elif part in ("A.weight", "B.weight"):
            matrices.setdefault(module, {})[part[0]] = tensor.float()
        else:
            raise ExportError(f"{name} is not supported (only lora_A.weight, lora_B.weight)")
    if alone := [module for module, pair in matrices.items() if len(pair) == 1]:
        raise ExportError(f"{alone[0]} has only one of lora_A and lora_B")
    pairs = {module: (pair["A"], pair["B"]) for module, pair in matrices.items()}
    return Adapter(config, pairs, heads, read_settings(folder / LABELS_FILE))


@torch.no_grad()
def add_products(model: Model, adapter: Adapter) -> None:
    """Add ``scale B A`` to the weights of an encoder.

    Raises:
        ExportError: the encoder has no such layer, or a layer of another size.
    """
    family, config = FAMILIES[model.config.family], adapter.config
    parameters = dict(model.named_parameters())
    for module, (a, b) in adapter.matrices.items():
        targets = family.read(f"{module}.weight", model.config)
        if not targets:
            raise ExportError(f"{module} is no layer of a {family.name}")
        for target in targets:
            weight = parameters.get(target.name)
            shape = [len(b) // len(targets), a.shape[1]]
            if weight is None or list(weight.shape) != shape or a.shape[0] != b.shape[1]:
                size = "no such layer" if weight is None else list(weight.shape)
                raise ExportError(
                    f"{module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, "
                    f"but the base has {size}"
                )
            scale = config.lora_alpha / (math.sqrt(len(a)) if config.use_rslora else len(a))
            weight.add_(scale * target.convert(b) @ a)
