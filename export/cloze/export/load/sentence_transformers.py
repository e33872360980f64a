"""Reads what the files of sentence-transformers say beside the files of an encoder."""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from cloze.export.errors import ExportError
from cloze.export.heads.embedding import (
    DENSE_ACTIVATIONS,
    EmbeddingRecipe,
    Norm,
    Projection,
    Step,
    UnitLength,
)
from cloze.export.load.source import (
    SENTENCE_SETTINGS,
    check_links,
    read_settings,
    read_tensors,
    weight_files,
)
from cloze.export.load.tokenizer import APPLIED_SETTINGS
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

MODULE_SETTINGS: Final = "config_sentence_transformers.json"

_ENCODERS: Final = ("Transformer", "MLMTransformer")
_STEPS: Final = ("Dense", "LayerNorm", "Normalize")


@dataclass(frozen=True, slots=True)
class Module:
    """A module of ``modules.json``.

    Attributes:
        kind: the name of its class.
        settings: its ``config.json``.
    """

    kind: str
    folder: Path
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """The settings that sentence-transformers has for an encoder.

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


@dataclass(frozen=True, slots=True)
class SentenceTransformersFolder:
    """A checkpoint's folder, with or without modules of sentence-transformers.

    Attributes:
        modules: the modules, in order; none in a folder of transformers.
        settings: ``config_sentence_transformers.json``; empty without modules.
        of_encoder: the settings of the encoder; the defaults without modules.
        recipe: the recipe of embeddings; None: the folder has none. A sparse encoder or a reranker
            has no recipe: its weights are those of the masked-language model or of the classifier,
            as in a folder without modules. A model of late interaction pools nothing.
    """

    path: Path
    modules: tuple[Module, ...]
    settings: Mapping[str, Any]
    of_encoder: EncoderSettings
    recipe: EmbeddingRecipe | None

    @classmethod
    def read(cls, folder: Path) -> "SentenceTransformersFolder":
        """Read a folder.

        Raises:
            ExportError: this release cannot reproduce a module or a setting.
        """
        modules = _read_modules(folder)
        if not modules:
            return cls(folder, (), {}, EncoderSettings(), None)
        settings = read_settings(folder / MODULE_SETTINGS)
        of_encoder = _read_encoder_settings(_encoder_of(folder, modules))
        recipe = _read_recipe(modules, settings, of_encoder)
        return cls(folder, modules, settings, of_encoder, recipe)

    @property
    def encoder(self) -> Path:
        """The folder of the encoder: a subfolder if a module says so."""
        return _encoder_of(self.path, self.modules)

    @property
    def projections_of_tokens(self) -> list[Module]:
        """The ``Dense`` modules of a model of late interaction; none in another model."""
        return [one for one in self.modules if one.kind == "Dense" and _is_late(self.modules)]

    def with_activation(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a ``config.json`` with the activation of a reranker's scores.

        sentence-transformers keeps it in a file of its own, which goes before ``config.json``.
        """
        declared = self.settings.get("activation_fn")
        if not str(declared).startswith("torch."):
            return settings
        return settings | {"sentence_transformers": {"activation_fn": declared}}

    def check_truncation(self, hidden_size: int) -> None:
        """Refuse embeddings that sentence-transformers cuts."""
        kept = self.settings.get("truncate_dim")
        if self.recipe is None or kept is None:
            return
        dimensions = self.recipe.dimensions(hidden_size)
        if not isinstance(kept, int) or kept < dimensions:
            raise ExportError(
                f"{MODULE_SETTINGS}: truncate_dim {kept!r} cuts embeddings of {dimensions} "
                "dimensions, which an export does not do: remove the setting; requests may ask for "
                "fewer dimensions (`dimensions`)"
            )

    def describe_steps(self) -> list[Any]:
        """Return of each module after the pooling: class, settings and hash of its weights."""
        steps = [module for module in self.modules if module.kind in _STEPS]
        if steps and steps[-1].kind == "Normalize":  # a part of the recipe
            del steps[-1]
        return [
            [
                module.kind,
                module.settings,
                None if module.kind == "Normalize" else sha256_of(*weight_files(module.folder)),
            ]
            for module in steps
        ]


def _encoder_of(folder: Path, modules: Sequence[Module]) -> Path:
    return next((module.folder for module in modules if module.kind in _ENCODERS), folder)


def _read_modules(folder: Path) -> tuple[Module, ...]:
    file = folder / "modules.json"
    if not file.is_file():
        return ()
    try:
        listed = [
            (str(module["type"]).rsplit(".", 1)[-1], folder / str(module["path"]))
            for module in json.loads(file.read_bytes())
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(f"modules.json cannot be read: {error}") from error
    for _, path in listed:
        check_links(path, folder)
    return tuple(Module(kind, path, read_settings(path / "config.json")) for kind, path in listed)


def _read_recipe(
    modules: Sequence[Module], settings: Mapping[str, Any], of_encoder: EncoderSettings
) -> EmbeddingRecipe | None:
    if modules[-1].kind == "SpladePooling":
        _check_splade(modules)
        return None
    if _is_late(modules) or [module.kind for module in modules] == ["Transformer"]:
        return None
    _check_order(modules)
    given, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(given, dict) or {*map(type, given.values())} - {str, type(None)}:
        raise ExportError(f"{MODULE_SETTINGS}: prompts must be texts by name, got {given!r}")
    prompts = {name: text for name, text in given.items() if text is not None}
    if default not in [None, *prompts, *Role]:  # sentence-transformers has prompts of both roles
        names = ", ".join(prompts) or "there are none"
        raise ExportError(
            f"{MODULE_SETTINGS}: default_prompt_name {default!r} is not one of the prompts "
            f"({names})"
        )
    pooling, *others = [one for one in modules if one.kind not in ("Transformer", "Dropout")]
    first, *further = _poolings(pooling.settings)
    if (include_prompt := pooling.settings.get("include_prompt", True)) not in (True, False):
        raise ExportError(
            f"pooling has include_prompt {include_prompt!r}; it must be true or false"
        )
    steps = [_read_step(module) for module in others]
    normalize = bool(steps) and isinstance(steps[-1], UnitLength)
    return EmbeddingRecipe(
        pooling=first,
        further_poolings=tuple(further),
        steps=tuple(steps[:-1] if normalize else steps),
        normalize=normalize,
        max_tokens=of_encoder.max_tokens,
        prompts=prompts,
        default_prompt=default if default in [*prompts] else None,
        include_prompt=include_prompt or not any(prompts.values()),
    )


def _is_late(modules: Sequence[Module]) -> bool:
    """Return whether modules are those of a model of late interaction, which pools nothing."""
    kinds = [module.kind for module in modules]
    is_late = kinds[:1] == ["Transformer"] and {*kinds[1:]} <= {"Dense", "Normalize"}
    return is_late and "Dense" in kinds


def _check_splade(modules: Sequence[Module]) -> None:
    """Refuse a sparse encoder that does not compute what `cloze.model_store.heads` describes."""
    kinds = [module.kind for module in modules]
    if len(kinds) != 2 or kinds[0] not in _ENCODERS:
        raise ExportError(
            f"modules.json names {', '.join(kinds)}; before SpladePooling, one encoder is supported"
        )
    for name, supported in (("pooling_strategy", "max"), ("activation_function", "relu")):
        value = modules[-1].settings.get(name, supported)
        if value != supported:
            raise ExportError(f"SpladePooling has {name} {value!r}; supported is {supported!r}")


def _check_order(modules: Sequence[Module]) -> None:
    """Refuse modules that do not pool texts, or that a recipe cannot have."""
    kinds = [module.kind for module in modules]
    after = [kind for kind in kinds if kind not in ("Transformer", "Dropout")]
    if after[:1] != ["Pooling"] or {*after[1:]} - {*_STEPS}:
        raise ExportError(
            f"modules.json names {', '.join(kinds)}, which is not supported: the order is "
            f"Transformer, perhaps Dropout, Pooling, then any of {', '.join(_STEPS)}"
        )


def _read_step(module: Module) -> Step:
    match module.kind:
        case "Dense":
            return read_projection(module)
        case "LayerNorm":
            tensors = _tensors_of(module, {"norm.weight", "norm.bias"})
            return Norm(tensors["norm.weight"], tensors["norm.bias"])
        case _:
            return UnitLength()


def _tensors_of(
    module: Module, required: Set[str], optional: Set[str] = frozenset()
) -> dict[str, Tensor]:
    """Return the tensors of a module."""
    tensors = read_tensors(weight_files(module.folder))
    if not required <= tensors.keys() <= required | optional:
        raise ExportError(
            f"the {module.kind} module in {module.folder.name} has the tensors "
            f"{', '.join(sorted(tensors))}; supported are {', '.join(sorted(required | optional))}"
        )
    return tensors


_OLDER_NAMES = {
    "processor_kwargs": "tokenizer_args",
    "config_kwargs": "config_args",
    "model_kwargs": "model_args",
}
"""Arguments of sentence-transformers for transformers, and their names before version 6."""

_WITHOUT_EFFECT = {"padding", "pad_to_multiple_of", "return_tensors"}
"""What a tokenizer is called with that changes no vector."""


def _read_encoder_settings(encoder: Path) -> EncoderSettings:
    """Return the settings in the first file that exists, in the order of sentence-transformers."""
    file = next((encoder / name for name in SENTENCE_SETTINGS if (encoder / name).is_file()), None)
    if file is None:
        return EncoderSettings()
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
    for kind in ("common", "text"):
        calls = (given["processing_kwargs"] or {}).get(kind) or {}
        for key in calls.keys() - _WITHOUT_EFFECT:
            raise ExportError(f"{file.name}: processing_kwargs {kind}.{key} is not supported")
    if (other := settings.get("tokenizer_name_or_path")) is not None:
        raise ExportError(f"{file.name}: tokenizer_name_or_path {other!r:.80} is not supported")
    unread = [f"model_kwargs {key}" for key in given["model_kwargs"] or {}]
    unread += [f"processor_kwargs {key}" for key in of_tokenizer.keys() - APPLIED_SETTINGS]
    unread += [key for key in ("query_length", "document_length") if settings.get(key) is not None]
    shown = ", ".join(sorted(unread))
    return EncoderSettings(
        max_tokens=limit,
        lowercase=settings.get("do_lower_case") is True,
        of_tokenizer=of_tokenizer,
        of_config=given["config_kwargs"] or {},
        notes=(f"{file.name}: not applied: {shown}",) if unread else (),
    )


def _poolings(settings: Mapping[str, Any]) -> tuple[Pooling, ...]:
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
        listed = modes if isinstance(modes, list) else []
        shown = " + ".join(map(str, listed)) or "without a mode"
        raise ExportError(f"pooling {shown} is not supported (any of {', '.join(Pooling)})")
    return tuple(Pooling(mode) for mode in modes)


_OF_TEXTS, _OF_TOKENS = "sentence_embedding", "token_embeddings"


def read_projection(module: Module, *, of_tokens: bool = False) -> Projection:
    """Return a ``Dense`` module, with ``of_tokens`` also one for the vectors of tokens.

    Raises:
        ExportError: it has an activation, an input or tensors that are not supported.
    """
    settings = module.settings
    names = (_OF_TEXTS, _OF_TOKENS) if of_tokens else (_OF_TEXTS,)
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, *names):
            raise ExportError(
                f"a Dense module with {key} {settings[key]!r} is not supported ({', '.join(names)})"
            )
    tensors = _tensors_of(module, {"linear.weight"}, {"linear.bias", "residual.weight"})
    weight = tensors["linear.weight"]
    residual: Tensor | bool = bool(settings.get("use_residual"))
    if residual and weight.shape[0] != weight.shape[1]:
        if "residual.weight" not in tensors:
            raise ExportError(f"the Dense module in {module.folder.name} lacks residual.weight")
        residual = tensors["residual.weight"]
    return Projection(weight, tensors.get("linear.bias"), _dense_activation(settings), residual)


def _dense_activation(settings: Mapping[str, Any]) -> str:
    """Return the name of the activation's class; Tanh without one, and if it is not torch's."""
    path = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = path.rsplit(".", 1)[-1] if path.startswith("torch.") else "Tanh"
    if name not in DENSE_ACTIVATIONS:
        raise ExportError(
            f"a Dense module with activation {name} is not supported "
            f"({', '.join(DENSE_ACTIVATIONS)})"
        )
    return name
