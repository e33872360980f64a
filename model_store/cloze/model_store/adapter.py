"""An adapter of a base: its matrices by their places in the base's graph, and its head."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cloze.model_store.adapter_section import AdaptedLayer, AdapterHead, AdapterSupport
from cloze.model_store.peft import CONFIG_FILE, AdapterError, Floats, LowRank, read_files
from cloze.model_store.safetensors_file import Tensors

_HEADS: Final = {"SEQ_CLS": "sequence_classification", "TOKEN_CLS": "token_classification"}
_WITHOUT_HEAD: Final = (None, "FEATURE_EXTRACTION")


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
    """The tensors of an adapter of a base.

    Attributes:
        layers: by their places in the graph.
        settings: ``config.json``, from which the labels of the head are read.
        encoder_sha256: digest of the encoder that it was trained on; None: it is not known.
        digest: sha256 of all files.
    """

    rank: int
    layers: Mapping[int, LowRank]
    head: Head | None
    settings: Mapping[str, Any]
    encoder_sha256: str | None
    digest: str

    @property
    def size(self) -> int:
        """The bytes of all numbers."""
        arrays = [matrix for layer in self.layers.values() for matrix in (layer.a, layer.b)]
        arrays += self.head.tensors.values() if self.head else ()
        # Layers that a checkpoint stores as one share their A.
        return sum({id(array): array.nbytes for array in arrays}.values())


def read_adapter(folder: Path, support: AdapterSupport, own: Mapping[str, Floats]) -> Adapter:
    """Read an adapter of a base.

    Args:
        folder: the folder.
        support: what the base says about adapters.
        own: tensors of the base's heads, which an adapter without them uses.

    Raises:
        AdapterError: the folder is malformed, is for another base, or needs what is not computed.
    """
    files = read_files(folder)
    low_rank = {_without_prefix(name, support): one for name, one in files.layers.items()}
    others = {_without_prefix(name, support): one for name, one in files.tensors.items()}
    if len(low_rank) < len(files.layers) or len(others) < len(files.tensors):
        raise AdapterError("a module has tensors under two names, with a prefix and without")
    head = _head(files.config, others, low_rank, support, own)
    layers: dict[int, LowRank] = {}
    for name, one in low_rank.items():
        if name not in support.layers:
            raise AdapterError(_stray(name, support))
        layers |= _parts(name, one, support.layers[name])
    rank = max((len(one.a) for one in layers.values()), default=0)
    return Adapter(rank, layers, head, files.settings, files.encoder_sha256, files.digest)


def _without_prefix(name: str, support: AdapterSupport) -> str:
    prefix = next((prefix for prefix in support.prefixes if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


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
    if not isinstance(task, str | None):
        raise AdapterError(f"{CONFIG_FILE}: task_type {str(task)[:80]!a} is not a string")
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
