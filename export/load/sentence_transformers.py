"""Reads the embedding recipe of a sentence-transformers directory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from cloze.export.errors import ExportError
from cloze.export.load.embedding_steps import Step, UnitLength, read_norm, read_projection
from cloze.export.load.source import (
    SENTENCE_SETTINGS,
    check_links,
    read_settings,
    weight_files,
)
from cloze.export.load.tokenizer_files import APPLIED_SETTINGS
from cloze.model_store.heads import Pooling
from cloze.model_store.manifest import Role
from cloze.model_store.plain_files import sha256_of

POOLING_FLAGS = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_max_tokens": Pooling.MAX,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": Pooling.MEAN_SQRT_LENGTH,
    "pooling_mode_weightedmean_tokens": Pooling.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
"""Pooling modes by their flags in sentence-transformers before version 6, in its order."""


@dataclass(frozen=True, slots=True)
class EmbeddingRecipe:
    """How hidden states become an embedding.

    The default is the usual recipe for an encoder without one: mean pooling and length 1.

    Attributes:
        further_poolings: poolings whose vectors are joined to that of the first one.
        steps: the modules after the pooling.
        max_tokens: the longest sequence of the checkpoint's tuning; None: the encoder's limit.
        prompts: texts to put before an input, by name.
        default_prompt: the name of the prompt for requests without a prompt; None: no prompt.
        lowercase: whether texts are lower-cased before the tokenizer.
        include_prompt: whether the start token and the tokens of a prompt are pooled.
        truncate_dim: the number of dimensions that sentence-transformers keeps; None: all.
    """

    pooling: Pooling = Pooling.MEAN
    steps: tuple[Step, ...] = ()
    normalize: bool = True
    max_tokens: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    further_poolings: tuple[Pooling, ...] = ()
    lowercase: bool = False
    include_prompt: bool = True
    truncate_dim: int | None = None

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        """All poolings, in the order of their vectors."""
        return (self.pooling, *self.further_poolings)

    def pool(self, hidden: Tensor, first: int = 0) -> Tensor:
        """Return the embeddings [E, D], not normalised, of ``hidden`` [E, S, H] without padding.

        Args:
            first: the first position to pool; 0 if the recipe includes prompts.
        """
        first = 0 if self.include_prompt else first
        vectors = torch.cat([pooled(hidden, pooling, first) for pooling in self.poolings], 1)
        for step in self.steps:
            vectors = cast(Tensor, step(vectors))
        return vectors

    def dimensions(self, hidden_size: int) -> int:
        """Return D, the number of dimensions of an embedding."""
        sizes = [step.dimensions for step in self.steps if step.dimensions is not None]
        return sizes[-1] if sizes else hidden_size * len(self.poolings)


def pooled(hidden: Tensor, pooling: Pooling, first: int = 0) -> Tensor:
    """Return one vector per sequence [E, H] of ``hidden`` [E, S, H] without padding.

    Args:
        first: the first position to pool. The positions keep their weights.
    """
    hidden = hidden[:, first:]
    match pooling:
        case Pooling.MEAN:
            return hidden.mean(1)
        case Pooling.CLS:
            return hidden[:, 0]
        case Pooling.LAST:
            return hidden[:, -1]
        case Pooling.MAX:
            return hidden.amax(1)
        case Pooling.MEAN_SQRT_LENGTH:
            return hidden.sum(1).div(hidden.shape[1] ** 0.5)
        case Pooling.WEIGHTED_MEAN:
            weights = torch.arange(1, hidden.shape[1] + 1, device=hidden.device) + first
            return (hidden * weights[:, None]).sum(1) / weights.sum()


def encoder_folder(folder: Path) -> Path:
    """Return the folder of the encoder: a subfolder in a sentence-transformers directory."""
    for kind, path in listed_modules(folder):
        if kind in ("Transformer", "MLMTransformer"):
            return folder / path
    return folder


def read_recipe(folder: Path) -> EmbeddingRecipe | None:
    """Return the recipe of a sentence-transformers directory; None for another directory.

    A directory of a sparse encoder or of a reranker has no recipe: its weights are those of the
    masked-language model or of the classifier, as in a directory without modules. One of late
    interaction pools nothing.

    Raises:
        ExportError: this release cannot reproduce a module or a setting.
    """
    modules = listed_modules(folder)
    if not modules:
        return None
    if modules[-1][0] == "SpladePooling":
        _check_splade(folder, modules)
        return None
    if late_modules(modules) or [kind for kind, _ in modules] == ["Transformer"]:
        return None
    file = folder / "config_sentence_transformers.json"
    settings = read_settings(file)
    given, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(given, dict) or {*map(type, given.values())} - {str, type(None)}:
        raise ExportError(f"{file.name}: prompts must be texts by name, got {given!r}")
    prompts = {name: text for name, text in given.items() if text is not None}
    if default not in [None, *prompts, *Role]:  # sentence-transformers has prompts of both roles
        names = ", ".join(prompts) or "there are none"
        raise ExportError(
            f"{file.name}: default_prompt_name {default!r} is not one of the prompts ({names})"
        )
    recipe = _read_modules(folder, modules)
    own = sentence_settings(folder)
    return replace(
        recipe,
        max_tokens=own.max_tokens,
        prompts=prompts,
        default_prompt=default if default in [*prompts] else None,
        lowercase=own.lowercase,
        include_prompt=recipe.include_prompt or not any(prompts.values()),
        truncate_dim=settings.get("truncate_dim"),
    )


def check_truncation(recipe: EmbeddingRecipe, hidden_size: int) -> None:
    """Refuse a recipe whose embeddings sentence-transformers cuts.

    Args:
        recipe: a recipe with a ``truncate_dim``.
        hidden_size: the width of the hidden states.
    """
    kept, dimensions = recipe.truncate_dim, recipe.dimensions(hidden_size)
    if not isinstance(kept, int) or kept < dimensions:
        raise ExportError(
            f"config_sentence_transformers.json: truncate_dim {kept!r} cuts embeddings of "
            f"{dimensions} dimensions, which an export does not do: remove the setting; requests "
            "may ask for fewer dimensions (`dimensions`)"
        )


def late_modules(modules: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the ``Dense`` modules of a model of late interaction; none for another model.

    Its vectors of tokens are projected, and neither pooled nor joined.
    """
    kinds = [kind for kind, _ in modules]
    dense = [module for module in modules if module[0] == "Dense"]
    is_late = kinds[:1] == ["Transformer"] and {*kinds[1:]} <= {"Dense", "Normalize"}
    return dense if is_late else []


def with_activation(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a ``config.json`` with the activation of a reranker's scores.

    In a directory with modules, sentence-transformers keeps it in a file of its own, which goes
    before ``config.json``.
    """
    declared = read_settings(folder / "config_sentence_transformers.json").get("activation_fn")
    if not listed_modules(folder) or not str(declared).startswith("torch."):
        return settings
    return settings | {"sentence_transformers": {"activation_fn": declared}}


def _check_splade(folder: Path, modules: list[tuple[str, str]]) -> None:
    """Refuse a sparse encoder that does not compute what `cloze.model_store.heads` describes."""
    kinds = [kind for kind, _ in modules]
    settings = read_settings(folder / modules[-1][1] / "config.json")
    if len(kinds) != 2 or kinds[0] not in ("Transformer", "MLMTransformer"):
        raise ExportError(
            f"modules.json names {', '.join(kinds)}; before SpladePooling, one encoder is supported"
        )
    for name, supported in (("pooling_strategy", "max"), ("activation_function", "relu")):
        value = settings.get(name, supported)
        if value != supported:
            raise ExportError(f"SpladePooling has {name} {value!r}; supported is {supported!r}")


_BEFORE, _STEPS = ("Transformer", "Dropout", "Pooling"), ("Dense", "LayerNorm", "Normalize")


def _read_modules(folder: Path, modules: list[tuple[str, str]]) -> EmbeddingRecipe:
    """Return what the modules say of a recipe."""
    poolings: tuple[Pooling, ...] = ()
    include_prompt = True
    steps: list[Step] = []
    for kind, _ in modules:
        if kind not in (*_BEFORE, *_STEPS):
            raise ExportError(
                f"modules.json names a {kind} module, which is not supported "
                f"({', '.join((*_BEFORE, *_STEPS))})"
            )
    for kind, path in modules:
        settings = read_settings(folder / path / "config.json")
        if kind in ("Transformer", "Dropout"):
            continue
        if (kind == "Pooling") != (not poolings):
            raise ExportError(
                f"modules.json puts {kind} where it is not supported "
                f"(the order is Transformer, Pooling, then any of {', '.join(_STEPS)})"
            )
        if kind == "Pooling":
            poolings = _poolings(settings)
            if (include_prompt := settings.get("include_prompt", True)) not in (True, False):
                raise ExportError(
                    f"pooling has include_prompt {include_prompt!r}; it must be true or false"
                )
        elif kind == "Dense":
            steps.append(read_projection(folder / path, settings))
        elif kind == "LayerNorm":
            steps.append(read_norm(folder / path))
        else:
            steps.append(UnitLength())
    if not poolings:
        raise ExportError("modules.json names no Pooling module")
    normalize = bool(steps) and isinstance(steps[-1], UnitLength)
    return EmbeddingRecipe(
        pooling=poolings[0],
        further_poolings=poolings[1:],
        steps=tuple(steps[:-1] if normalize else steps),
        normalize=normalize,
        include_prompt=include_prompt,
    )


def describe_steps(folder: Path) -> list[Any]:
    """Return each module after the pooling: its class, its settings and the hash of its weights."""
    described: list[Any] = []
    for kind, path in listed_modules(folder):
        if kind in _STEPS:
            module = folder / path
            has_weights = kind != "Normalize"
            weights = sha256_of(*weight_files(module)) if has_weights else None
            described.append([kind, read_settings(module / "config.json"), weights])
    ends_normalised = bool(described) and described[-1][0] == "Normalize"  # a part of the recipe
    return described[:-1] if ends_normalised else described


def listed_modules(folder: Path) -> list[tuple[str, str]]:
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
        check_links(folder / path, folder)
    return modules


_OLDER_NAMES = {
    "processor_kwargs": "tokenizer_args",
    "config_kwargs": "config_args",
    "model_kwargs": "model_args",
}
"""Arguments of sentence-transformers for transformers, and their names before version 6."""

_WITHOUT_EFFECT = {"padding", "pad_to_multiple_of", "return_tensors"}
"""What a tokenizer is called with that changes no vector."""


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """The settings of an encoder in a sentence-transformers directory.

    Attributes:
        max_tokens: the longest sequence of the tuning; None: the tokenizer's limit.
        lowercase: whether texts are lower-cased.
        of_tokenizer: what overrules ``tokenizer_config.json``.
        of_config: what overrules ``config.json``.
        notes: settings that are not applied.
    """

    max_tokens: int | None = None
    lowercase: bool = False
    of_tokenizer: Mapping[str, Any] = field(default_factory=dict)
    of_config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def sentence_settings(folder: Path) -> SentenceSettings:
    """Return the settings of the encoder of a sentence-transformers directory.

    They stand in the first settings file that exists. The order of the files is that of
    sentence-transformers. A directory without modules has none.

    Raises:
        ExportError: a setting is wrong, or changes vectors in a way that an export does not.
    """
    encoder = encoder_folder(folder)
    file = next((encoder / name for name in SENTENCE_SETTINGS if (encoder / name).is_file()), None)
    if file is None or not listed_modules(folder):
        return SentenceSettings()
    settings = read_settings(file)
    given = {name: settings.get(old, settings.get(name)) for name, old in _OLDER_NAMES.items()}
    given["processing_kwargs"] = settings.get("processing_kwargs")
    for name, value in given.items():
        if not isinstance(value, dict | None):
            raise ExportError(f"{file.name}: {name} must be an object, got {value!r:.80}")
    of_tokenizer = given["processor_kwargs"] or {}
    limit = of_tokenizer.get("model_max_length", settings.get("max_seq_length"))
    if limit is not None and (not isinstance(limit, int) or limit < 3):
        raise ExportError(
            f"{file.name}: max_seq_length must be a number of at least 3, got {limit!r}"
        )
    _check_calls(file.name, given["processing_kwargs"] or {})
    if (other := settings.get("tokenizer_name_or_path")) is not None:
        raise ExportError(f"{file.name}: tokenizer_name_or_path {other!r:.80} is not supported")
    unread = [f"model_kwargs {key}" for key in given["model_kwargs"] or {}]
    unread += [f"processor_kwargs {key}" for key in of_tokenizer.keys() - APPLIED_SETTINGS]
    unread += [key for key in ("query_length", "document_length") if settings.get(key) is not None]
    shown = ", ".join(sorted(unread))
    return SentenceSettings(
        max_tokens=limit,
        lowercase=settings.get("do_lower_case") is True,
        of_tokenizer=of_tokenizer,
        of_config=given["config_kwargs"] or {},
        notes=(f"{file.name}: not applied: {shown}",) if unread else (),
    )


def _check_calls(file: str, calls: Mapping[str, Any]) -> None:
    """Refuse arguments with which sentence-transformers calls the tokenizer of texts."""
    for kind in ("common", "text"):
        for key in (calls.get(kind) or {}).keys() - _WITHOUT_EFFECT:
            raise ExportError(f"{file}: processing_kwargs {kind}.{key} is not supported")


def _poolings(settings: dict[str, Any]) -> tuple[Pooling, ...]:
    modes = settings.get("pooling_mode")
    if modes is None:  # before sentence-transformers 6: one boolean per mode, none means the mean
        flags = {
            key for key, value in settings.items() if key.startswith("pooling_mode_") and value
        }
        modes = [mode for flag, mode in POOLING_FLAGS.items() if flag in flags]
        modes += sorted(flag.removeprefix("pooling_mode_") for flag in flags - set(POOLING_FLAGS))
        modes = modes or [Pooling.MEAN]
    elif isinstance(modes, str):
        modes = [modes]
    if not isinstance(modes, list) or not modes or not set(modes) <= set(Pooling):
        shown = (
            " + ".join(map(str, modes)) if isinstance(modes, list) and modes else "without a mode"
        )
        raise ExportError(f"pooling {shown} is not supported (any of {', '.join(Pooling)})")
    return tuple(Pooling(mode) for mode in modes)
