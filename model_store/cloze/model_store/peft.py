"""Reads folders that the library PEFT writes: LoRA matrices, and heads, of any base.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors``. A folder with the rank 0 has
a head only. What would change a result and is not computed here is refused by name.

Source: Hu et al. 2021, "LoRA"; Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for
Fine-Tuning with LoRA"; the file format of https://github.com/huggingface/peft.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.limits import MAX_ADAPTER_BYTES, MAX_MANIFEST_BYTES
from cloze.model_store.plain_files import read_plain
from cloze.model_store.safetensors_file import Tensors, parse_safetensors

CONFIG_FILE: Final = "adapter_config.json"
TENSORS_FILE: Final = "adapter_model.safetensors"
LABELS_FILE: Final = "config.json"
"""Optional: the settings of the fine-tuned model, with its labels."""

ENCODER_DIGEST: Final = "cloze_encoder_sha256"
"""The metadata of `TENSORS_FILE` with the digest of the encoder that the adapter was trained on.

It is not in `LABELS_FILE`: where there is one, transformers takes the folder for a whole model.
"""

NAME_PREFIX: Final = "base_model.model."
"""The first part of the names of tensors; the rest is the name of a module of transformers."""

MAX_RANK: Final = 512

_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt")
_MATRIX: Final = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")

_HARMLESS: Final = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    )
)
"""Settings that are read elsewhere, or that change training only."""

_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "use_rslora": (True, False, None),
}
"""Settings that have only some of PEFT's values. Other initial values change the base's weights."""


class AdapterError(ValueError):
    """A folder is no adapter of a base; one line without the name of the folder."""


Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrices of one layer.

    Attributes:
        a: [R, inputs].
        b: [R, outputs], the columns of B times the scale.
    """

    a: Floats
    b: Floats


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of a folder, before it is compared with a base.

    Attributes:
        config: ``adapter_config.json``.
        layers: by the name of a module of transformers.
        tensors: those of heads, by transformers' names.
        settings: ``config.json``; empty: there is none.
        encoder_sha256: digest of the encoder that it was trained on; None: it is not known.
        digest: sha256 of all files.
    """

    config: Mapping[str, Any]
    layers: Mapping[str, LowRank]
    tensors: Tensors
    settings: Mapping[str, Any]
    encoder_sha256: str | None
    digest: str


def is_adapter(folder: Path) -> bool:
    """Return whether a folder is meant to be an adapter."""
    try:
        return (folder / CONFIG_FILE).exists()
    except PermissionError:  # for example lost+found of a volume
        return False


def read_files(folder: Path) -> AdapterFiles:
    """Read the files of an adapter of any base.

    Raises:
        AdapterError: the folder is malformed, or needs what is not computed.
    """
    for name in _PICKLES:
        if (folder / name).exists() and not (folder / TENSORS_FILE).exists():
            raise AdapterError(
                f"{name} is never loaded, since it can run code; save {TENSORS_FILE}"
            )
    data, labels = _read(folder, TENSORS_FILE, MAX_ADAPTER_BYTES), b"{}"
    config_data = _read(folder, CONFIG_FILE, MAX_MANIFEST_BYTES)
    if (folder / LABELS_FILE).exists():
        labels = _read(folder, LABELS_FILE, MAX_MANIFEST_BYTES)
    config, settings = _parse(CONFIG_FILE, config_data), _parse(LABELS_FILE, labels)
    _check_config(config)
    try:
        tensors, metadata = parse_safetensors(data)
    except ValueError as error:
        raise AdapterError(f"{TENSORS_FILE}: {error}") from None
    matrices, others = _split(tensors)
    return AdapterFiles(
        config=config,
        layers={name: _low_rank(name, pair, config) for name, pair in matrices.items()},
        tensors=others,
        settings=settings,
        encoder_sha256=metadata.get(ENCODER_DIGEST),
        digest=hashlib.sha256(config_data + labels + data).hexdigest(),
    )


def _read(folder: Path, name: str, limit: int) -> bytes:
    try:
        return read_plain((folder / name).resolve(), limit)  # a cache of the hub has links
    except OSError as error:
        raise AdapterError(f"{name} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise AdapterError(f"{name} {error}") from None


def _parse(name: str, data: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        raise AdapterError(f"{name} is not JSON") from None
    if not isinstance(parsed, dict):
        raise AdapterError(f"{name} is not a JSON object")
    return parsed


def _check_config(config: Mapping[str, Any]) -> None:
    """Refuse settings that are not computed, or unknown.

    Raises:
        AdapterError: a setting is refused.
    """
    for name, allowed in _VALUES.items():
        value = config.get(name, allowed[0])
        if not any(value is one or (isinstance(value, str) and value == one) for one in allowed):
            shown = ", ".join(map(str, allowed))
            raise AdapterError(
                f"{CONFIG_FILE}: {name} is {str(value)[:80]!a}, which is not supported "
                f"(allowed: {shown})"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if type(rank) is not int or not 0 <= rank <= MAX_RANK:
        raise AdapterError(f"{CONFIG_FILE}: r is {str(rank)[:80]}; allowed are 0 to {MAX_RANK}")
    _number("lora_alpha", alpha)
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            raise AdapterError(f"{CONFIG_FILE}: {name} is not an object")
        for key, value in pattern.items():
            if not re.fullmatch(r"[\w.]+", key):
                raise AdapterError(f"{CONFIG_FILE}: {name} has {key[:80]!a}; give plain names")
            _number(f"{name}.{key}", value)
    known = _HARMLESS | _VALUES.keys() | {"rank_pattern", "alpha_pattern"}
    for name, value in config.items():
        if name not in known and value not in (None, False, [], {}, ""):
            raise AdapterError(
                f"{CONFIG_FILE}: {name[:80]} is {str(value)[:80]!a}, which is not supported"
            )


def _number(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):  # type: ignore[arg-type]
        raise AdapterError(f"{CONFIG_FILE}: {name} is {str(value)[:80]!a}, not a number")


def _split(tensors: Tensors) -> tuple[dict[str, dict[str, Floats]], Tensors]:
    """Return A and B by the names of modules, and the other tensors by their names."""
    matrices: dict[str, dict[str, Floats]] = {}
    others: Tensors = {}
    for full_name, tensor in tensors.items():
        if not full_name.startswith(NAME_PREFIX):
            raise AdapterError(f"the tensor {full_name[:120]!a} does not begin with {NAME_PREFIX}")
        name = full_name.removeprefix(NAME_PREFIX)
        if match := _MATRIX.fullmatch(name):
            matrices.setdefault(match["layer"], {})[match["side"]] = tensor
        elif ".lora_" in name:
            raise AdapterError(
                f"the tensor {name[:120]!a} is not supported (only lora_A.weight, lora_B.weight)"
            )
        else:
            others[name] = tensor
    return matrices, others


def _low_rank(name: str, pair: Mapping[str, Floats], config: Mapping[str, Any]) -> LowRank:
    """Return the matrices of a layer, B with the scale."""
    if pair.keys() != {"A", "B"}:
        raise AdapterError(f"the layer {name!a} has lora_{min(pair)} only")
    a, b = pair["A"], pair["B"]
    rank = _of_pattern("rank_pattern", name, config, config["r"])
    if a.ndim != 2 or b.ndim != 2 or not len(a) == b.shape[1] == rank or not rank:
        raise AdapterError(
            f"the layer {name!a} has A {list(a.shape)} and B {list(b.shape)}; its rank is {rank}"
        )
    alpha = _of_pattern("alpha_pattern", name, config, config.get("lora_alpha", 8))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.ascontiguousarray(b.T * np.float64(scale), np.float32)
    if not np.isfinite(scaled).all():
        raise AdapterError(f"the layer {name!a} times {scale:.3g}, alpha by rank, is not finite")
    return LowRank(np.ascontiguousarray(a), scaled)


def _of_pattern(pattern: str, layer: str, config: Mapping[str, Any], default: Any) -> Any:
    """Return a layer's own value: that of the first name in the pattern that ends its path."""
    named = config.get(pattern) or {}
    return next(
        (v for name, v in named.items() if layer == name or layer.endswith(f".{name}")), default
    )
