"""Merges an adapter with its base: products into the encoder, and the adapter's heads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from cloze.export.blocks.config import EncoderConfig
from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES, Family
from cloze.export.heads import EXPORT_HEADS
from cloze.export.load.source import CheckpointFiles, locate
from cloze.export.model import Model
from cloze.model_store.peft import CONFIG_FILE, AdapterError, AdapterFiles, read_files

_BASE: Final = "base_model_name_or_path"

_LAST_LAYERS: Final = ("classifier.weight", "out_proj.weight")
"""The ends of the names of the tensors with one row per label."""


def read_adapter(folder: Path) -> tuple[AdapterFiles, CheckpointFiles]:
    """Read an adapter, and locate the checkpoint that it names as its base; see `locate`.

    Raises:
        ExportError: the folder is damaged, has what is not supported, or names no base.
    """
    try:
        adapter = read_files(folder)
    except AdapterError as error:
        raise ExportError(str(error)) from None
    if not isinstance(adapter.config.get(_BASE), str):
        raise ExportError(f"{CONFIG_FILE}: {_BASE} is missing")
    return adapter, locate(adapter.config[_BASE], adapter.config.get("revision"))


def with_heads(
    tensors: Mapping[str, Tensor], adapter: AdapterFiles, family: Family, config: EncoderConfig
) -> dict[str, Tensor]:
    """Return the tensors of the encoder of a base, and those of the heads of an adapter."""
    encoder = {
        name: tensor
        for name, tensor in tensors.items()
        if any(target.name.startswith("encoder.") for target in family.read(name, config))
    }
    return encoder | {name: torch.from_numpy(array) for name, array in adapter.tensors.items()}


def head_settings(adapter: AdapterFiles, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of a base with the heads of an adapter.

    Without settings of the adapter, labels have transformers' names: ``LABEL_0`` and so on.
    """
    if adapter.settings:
        return dict(adapter.settings)
    rows = [len(one) for name, one in adapter.tensors.items() if name.endswith(_LAST_LAYERS)]
    labels = {str(number): f"LABEL_{number}" for number in range(rows[0] if rows else 2)}
    task_type = adapter.config.get("task_type")
    heads = [head for head in EXPORT_HEADS.values() if task_type and head.task_type == task_type]
    return {**base, "id2label": labels, "architectures": [head.classes[0] for head in heads]}


@torch.no_grad()
def add_products(model: Model, adapter: AdapterFiles, encoder_sha256: str) -> None:
    """Add ``scale B A`` to the weights of an encoder.

    Raises:
        ExportError: the adapter names another digest of its base than ``encoder_sha256``, or the
            encoder has no such layer, or a layer of another size.
    """
    if adapter.encoder_sha256 not in (None, encoder_sha256):
        raise ExportError(
            f"this is an adapter of another encoder than that of {adapter.config[_BASE]}"
        )
    family, parameters = FAMILIES[model.config.family], dict(model.named_parameters())
    for module, low_rank in adapter.layers.items():
        targets = family.read(f"{module}.weight", model.config)
        if not targets:
            raise ExportError(f"{module} is no layer of a {family.name}")
        a, b = torch.from_numpy(low_rank.a), torch.from_numpy(low_rank.b.T)
        for target in targets:
            weight = parameters.get(target.name)
            shape = [len(b) // len(targets), a.shape[1]]
            if weight is None or list(weight.shape) != shape:
                size = "no such layer" if weight is None else list(weight.shape)
                raise ExportError(
                    f"{module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, "
                    f"but the base has {size}"
                )
            weight.add_(target.convert(b) @ a)
