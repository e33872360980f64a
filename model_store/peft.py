"""Reads adapters from folders that the library PEFT writes: LoRA matrices, and heads.

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

from cloze.model_store.adapter_section import AdaptedLayer, AdapterHead, AdapterSupport
from cloze.model_store.limits import MAX_ADAPTER_BYTES, MAX_MANIFEST_BYTES
from cloze.model_store.plain_files import read_plain
from cloze.model_store.safetensors_file import Tensors, parse_safetensors

CONFIG_FILE: Final = "adapter_config.json"
TENSORS_FILE: Final = "adapter_model.safetensors"
LABELS_FILE: Final = "config.json"
"""Optional: the settings of the fine-tuned model, with its labels."""

ENCODER_DIGEST: Final = "cloze_encoder_sha256"
"""Its setting with the digest of the encoder that the adapter was trained on, if it is known."""

NAME_PREFIX: Final = "base_model.model."
"""The first part of the names of tensors; the rest is the name of a module of transformers."""

MAX_RANK: Final = 512

_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt")
_HEADS: Final = {"SEQ_CLS": "sequence_classification", "TOKEN_CLS": "token_classification"}
_WITHOUT_HEAD: Final = (None, "FEATURE_EXTRACTION")
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
class Head:
    """The head of an adapter.

    Attributes:
        name: the head's name.
        tensors: by our names: ``classifier.weight`` [L, H] and so on.
        spec: how the tensors are computed with.
    """

    name: str
    tensors: Tensors
    spec: AdapterHead

    def logits(self, rows: Floats) -> Floats:
        """Return the logits [n, L] of rows [n, H]."""
        if "pooler.weight" in self.tensors:
            rows = self._linear("pooler", rows)
            rows = np.tanh(rows) if self.spec.activation == "tanh" else np.maximum(rows, 0)
        return self._linear("classifier", rows)

    def _linear(self, name: str, rows: Floats) -> Floats:
        product: Floats = rows @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return product if bias is None else product + bias


@dataclass(frozen=True, slots=True)
class Adapter:
    """The tensors of an adapter.

    Attributes:
        layers: by their places in the graph.
        settings: ``config.json``, from which the labels of the head are read.
        digest: sha256 of all files.
    """

    rank: int
    layers: Mapping[int, LowRank]
    head: Head | None
    settings: Mapping[str, Any]
    digest: str

    @property
    def size(self) -> int:
        """The bytes of all numbers."""
        arrays = [matrix for layer in self.layers.values() for matrix in (layer.a, layer.b)]
        arrays += self.head.tensors.values() if self.head else ()
        # Layers that a checkpoint stores as one share their A.
        return sum({id(array): array.nbytes for array in arrays}.values())


def is_adapter(folder: Path) -> bool:
    """Return whether a folder is meant to be an adapter."""
    try:
        return (folder / CONFIG_FILE).exists()
    except PermissionError:  # for example lost+found of a volume
        return False


def read_adapter(folder: Path, support: AdapterSupport, own: Mapping[str, Floats]) -> Adapter:
    """Read an adapter of a base.

    Args:
        folder: the folder.
        support: what the base says about adapters.
        own: tensors of the base's heads, which an adapter without them uses.

    Raises:
        AdapterError: the folder is malformed, is for another base, or needs what is not computed.
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
    check_config(config)
    try:
        tensors = parse_safetensors(data)
    except ValueError as error:
        raise AdapterError(f"{TENSORS_FILE}: {error}") from None
    matrices, others = _split(tensors, support)
    low_rank = {name: _low_rank(name, pair, config) for name, pair in matrices.items()}
    head = _head(config, others, low_rank, support, own)
    layers: dict[int, LowRank] = {}
    for name, one in low_rank.items():
        if name not in support.layers:
            raise AdapterError(_stray(name, support))
        layers |= _parts(name, one, support.layers[name])
    digest = hashlib.sha256(config_data + labels + data).hexdigest()
    rank = max((len(one.a) for one in layers.values()), default=0)
    return Adapter(rank, layers, head, settings, digest)


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


def check_config(config: Mapping[str, Any]) -> None:
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


def _split(
    tensors: Tensors, support: AdapterSupport
) -> tuple[dict[str, dict[str, Floats]], Tensors]:
    """Return A and B by the names of layers, and the other tensors by their names."""
    matrices: dict[str, dict[str, Floats]] = {}
    others: Tensors = {}
    for full_name, tensor in tensors.items():
        if not full_name.startswith(NAME_PREFIX):
            raise AdapterError(f"the tensor {full_name[:120]!a} does not begin with {NAME_PREFIX}")
        name = full_name.removeprefix(NAME_PREFIX)
        prefix = next((p for p in support.prefixes if name.startswith(p)), "")
        name = name.removeprefix(prefix)
        if match := _MATRIX.fullmatch(name):
            matrices.setdefault(match["layer"], {})[match["side"]] = tensor
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
    return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b.T * np.float32(scale)))


def _of_pattern(pattern: str, layer: str, config: Mapping[str, Any], default: Any) -> Any:
    """Return a layer's own value: that of the first name in the pattern that ends its path."""
    named = config.get(pattern) or {}
    return next(
        (v for name, v in named.items() if layer == name or layer.endswith(f".{name}")), default
    )


def _parts(name: str, one: LowRank, layer: AdaptedLayer) -> dict[int, LowRank]:
    """Return the matrices of the layers that a checkpoint stores as one, by their places."""
    count = len(layer.numbers)
    if (inputs := one.a.shape[1]) != layer.inputs:
        raise AdapterError(f"the layer {name!a} has {inputs} inputs; its base has {layer.inputs}")
    if (outputs := one.b.shape[1]) != layer.outputs * count:
        raise AdapterError(
            f"the layer {name!a} has {outputs} outputs; its base has {layer.outputs * count}"
        )
    parts = np.split(one.b, count, axis=1)
    return {
        number: LowRank(one.a, np.ascontiguousarray(part))
        for number, part in zip(layer.numbers, parts, strict=True)
    }


def _head(
    config: Mapping[str, Any],
    others: Tensors,
    low_rank: dict[str, LowRank],
    support: AdapterSupport,
    own: Mapping[str, Floats],
) -> Head | None:
    """Return the head; take the matrices of its layers out of ``low_rank``."""
    task = config.get("task_type")
    if task not in _HEADS:
        if others:
            raise AdapterError(
                f"the tensor {min(others)[:120]!a} belongs nowhere: task_type is {task!a}, "
                f"and heads have {', '.join(_HEADS)}"
            )
        if task not in _WITHOUT_HEAD:
            raise AdapterError(f"{CONFIG_FILE}: task_type {str(task)[:80]!a} is not supported")
        return None
    name = _HEADS[task]
    if name not in support.heads:
        raise AdapterError(f"task_type {task} is not supported for the family of the base")
    spec = support.heads[name]
    if stray := others.keys() - spec.tensors.keys():
        raise AdapterError(_stray(min(stray), support))
    tensors: Tensors = {}
    for theirs, ours in spec.tensors.items():
        tensor = others.get(theirs)
        if tensor is None and not ours.startswith("classifier."):
            tensor = own.get(theirs)
        if tensor is None and ours.endswith(".weight"):
            raise AdapterError(
                f"the head needs {theirs}, which neither the adapter nor its base has; "
                "name its module in modules_to_save"
            )
        if tensor is None:
            continue
        layer = theirs.removesuffix(".weight")
        if theirs != layer and (one := low_rank.pop(layer, None)) is not None:
            if one.b.shape[1] != len(tensor) or one.a.shape[1] != tensor.shape[1]:
                raise AdapterError(f"the layer {layer!a} does not have the sizes of its weight")
            tensor = tensor + one.b.T @ one.a
        tensors[ours] = tensor
    return Head(name, tensors, spec)


def _stray(name: str, support: AdapterSupport) -> str:
    kinds = sorted({layer.rpartition(".")[2] for layer in support.layers})
    return (
        f"{name[:120]!a} belongs nowhere: adapters of this base change the layers "
        f"{', '.join(kinds)}; export the base again with --adapters to change others"
    )


def check_head(head: Head, hidden_size: int) -> int:
    """Return the number of labels of a head, after a check of its shapes.

    Raises:
        AdapterError: a tensor has another shape than the base's hidden size demands.
    """
    tensors = head.tensors
    labels = len(tensors["classifier.weight"]) if tensors["classifier.weight"].ndim else 0
    shapes = {
        "pooler.weight": (hidden_size, hidden_size),
        "pooler.bias": (hidden_size,),
        "classifier.weight": (labels, hidden_size),
        "classifier.bias": (labels,),
    }
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name] or not labels:
            raise AdapterError(
                f"the head's {name} is {list(tensor.shape)}; its base has {hidden_size} numbers "
                "per token"
            )
    return labels
