"""Reads the embedding recipe of a sentence-transformers directory."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cloze.export.checkpoint_files import (
    SENTENCE_SETTINGS,
    read_settings,
    read_tensors,
    weight_files,
)
from cloze.export.errors import ExportError
from cloze.model_store.heads import Pooling

POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
"""Pooling modes by their flags in sentence-transformers before version 6."""


class Projection(nn.Module):
    """A dense layer after pooling (sentence-transformers' ``Dense``)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tanh: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0])
        self.linear.weight.data = weight.float()
        self.linear.bias.data = torch.zeros(weight.shape[0]) if bias is None else bias.float()
        self.tanh = tanh

    def forward(self, pooled: Tensor) -> Tensor:
        """Project ``pooled`` [E, H] to [E, D]."""
        projected: Tensor = self.linear(pooled)
        return projected.tanh() if self.tanh else projected


@dataclass(frozen=True, slots=True)
class EmbeddingRecipe:
    """How hidden states become an embedding.

    The default is the usual recipe for an encoder without one: mean pooling and length 1.

    Attributes:
        max_tokens: the longest sequence of the checkpoint's tuning; None: the encoder's limit.
        prompts: texts to put before an input, by name.
        default_prompt: the name of the prompt for requests without a prompt; None: no prompt.
    """

    pooling: Pooling = Pooling.MEAN
    projections: tuple[Projection, ...] = ()
    normalize: bool = True
    max_tokens: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    def pool(self, hidden: Tensor) -> Tensor:
        """Return the embeddings [E, D], not normalised, of ``hidden`` [E, S, H] without padding."""
        match self.pooling:
            case Pooling.MEAN:
                pooled = hidden.mean(1)
            case Pooling.CLS:
                pooled = hidden[:, 0]
            case Pooling.MAX:
                pooled = hidden.amax(1)
            case Pooling.MEAN_SQRT_LENGTH:
                pooled = hidden.sum(1) / hidden.shape[1] ** 0.5
        for projection in self.projections:
            pooled = projection(pooled)
        return pooled

    def dimensions(self, hidden_size: int) -> int:
        """Return D, the number of dimensions of an embedding."""
        return self.projections[-1].linear.out_features if self.projections else hidden_size


def encoder_folder(folder: Path) -> Path:
    """Return the folder of the encoder: a subfolder in a sentence-transformers directory."""
    for kind, path in _modules(folder):
        if kind in ("Transformer", "MLMTransformer"):
            return folder / path
    return folder


def read_recipe(folder: Path) -> EmbeddingRecipe | None:
    """Return the recipe of a sentence-transformers directory; None for another directory.

    A directory of a sparse encoder has no recipe: its weights are those of the masked-language
    model, as in a directory without modules.

    Raises:
        ExportError: this release cannot reproduce a module or a setting.
    """
    modules = _modules(folder)
    if not modules:
        return None
    if modules[-1][0] == "SpladePooling":
        _check_splade(folder, modules)
        return None
    pooling, projections, normalize = _read_modules(folder, modules)
    settings = read_settings(folder / "config_sentence_transformers.json")
    prompts = {
        name: text
        for name, text in (settings.get("prompts") or {}).items()
        if isinstance(text, str)
    }
    default = settings.get("default_prompt_name")
    return EmbeddingRecipe(
        pooling=pooling,
        projections=tuple(projections),
        normalize=normalize,
        max_tokens=_max_tokens(encoder_folder(folder)),
        prompts=prompts,
        default_prompt=default if default in prompts else None,
    )


def _check_splade(folder: Path, modules: list[tuple[str, str]]) -> None:
    """Refuse a sparse encoder that does not compute what `cloze.model_store.heads` describes."""
    kinds, settings = (
        [kind for kind, _ in modules],
        read_settings(folder / modules[-1][1] / "config.json"),
    )
    if len(kinds) != 2 or kinds[0] not in ("Transformer", "MLMTransformer"):
        raise ExportError(
            f"modules.json names {', '.join(kinds)}; before SpladePooling, one encoder is supported"
        )
    for name, supported in (("pooling_strategy", "max"), ("activation_function", "relu")):
        value = settings.get(name, supported)
        if value != supported:
            raise ExportError(f"SpladePooling has {name} {value!r}; supported is {supported!r}")


def _read_modules(
    folder: Path, modules: list[tuple[str, str]]
) -> tuple[Pooling, list[Projection], bool]:
    """Return the pooling, the projections and whether embeddings are normalised."""
    pooling: Pooling | None = None
    projections: list[Projection] = []
    normalize = False
    for kind, path in modules:
        settings = read_settings(folder / path / "config.json")
        if kind in ("Transformer", "Dropout"):
            continue
        if normalize or (kind == "Pooling") != (pooling is None):
            raise ExportError(
                f"modules.json puts {kind} where it is not supported "
                "(the order is Transformer, Pooling, any Dense, Normalize)"
            )
        if kind == "Pooling":
            pooling = _pooling(settings)
        elif kind == "Dense":
            projections.append(_projection(folder / path, settings))
        elif kind == "Normalize":
            normalize = True
        else:
            raise ExportError(f"modules.json names a {kind} module, which is not supported")
    if pooling is None:
        raise ExportError("modules.json names no Pooling module")
    return pooling, projections, normalize


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return (class name, path) of each module, in order."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        modules = [
            (str(module["type"]).rsplit(".", 1)[-1], str(module["path"]))
            for module in json.loads(file.read_text())
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(f"modules.json cannot be read: {error}") from error
    for _, path in modules:
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise ExportError(f"modules.json names {path!r}, which is outside the directory")
    return modules


def _max_tokens(folder: Path) -> int | None:
    """Return the longest sequence of the tuning, from the first settings file that exists.

    The order of the files is that of sentence-transformers.
    """
    for name in SENTENCE_SETTINGS:
        file = folder / name
        if file.is_file():
            limit = read_settings(file).get("max_seq_length")
            if limit is not None and (not isinstance(limit, int) or limit < 3):
                raise ExportError(
                    f"{file.name}: max_seq_length must be a number of at least 3, got {limit!r}"
                )
            return limit
    return None


def _pooling(settings: dict[str, Any]) -> Pooling:
    modes = settings.get("pooling_mode")
    if modes is None:  # before sentence-transformers 6: one boolean per mode
        flags = [
            key for key, value in settings.items() if key.startswith("pooling_mode_") and value
        ]
        modes = [POOLING_FLAGS.get(flag, flag.removeprefix("pooling_mode_")) for flag in flags]
    elif isinstance(modes, str):
        modes = [modes]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in list(Pooling):
        shown = (
            " + ".join(map(str, modes)) if isinstance(modes, list) and modes else "without a mode"
        )
        raise ExportError(f"pooling {shown} is not supported (one of {', '.join(Pooling)})")
    if settings.get("include_prompt", True) is False:
        raise ExportError(
            "pooling that leaves out the prompt (include_prompt: false) is not supported"
        )
    return Pooling(modes[0])


def _projection(folder: Path, settings: dict[str, Any]) -> Projection:
    activation = str(
        settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    ).rsplit(".", 1)[-1]
    if activation not in ("Tanh", "Identity"):
        raise ExportError(
            f"a Dense module with activation {activation} is not supported (Tanh or Identity)"
        )
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key, "sentence_embedding") != "sentence_embedding":
            raise ExportError(
                f"a Dense module with {key} {settings[key]!r} is not supported (sentence_embedding)"
            )
    tensors = read_tensors(weight_files(folder))
    if settings.get("use_residual") or not {"linear.weight"} <= tensors.keys() <= {
        "linear.weight",
        "linear.bias",
    }:
        raise ExportError(
            f"the Dense module in {folder.name} is more than one linear layer "
            f"({', '.join(sorted(tensors))})"
        )
    return Projection(tensors["linear.weight"], tensors.get("linear.bias"), activation == "Tanh")
