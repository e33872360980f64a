"""Writes the weights of a BERT bundle as a Hugging Face folder, for engines that read no bundle."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from safetensors.numpy import save_file

from cloze.bench.errors import BenchError
from cloze.model_store import Bundle
from cloze.model_store.tensors import WORD_TABLE

Array = NDArray[np.float32]

_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
_SMOOTHED_WITH = {"key": "query", "value": "query"}
"""Products that share the input of another product, and its smoothing factors."""

_BIAS = {"output": "attention_norm.skip", "down": "output_norm.skip"}
"""Products whose bias the graph adds after the residual connection."""


def write_checkpoint(bundle: Bundle, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and ``tokenizer.json`` of the fp32 graph.

    The graph has no bias of keys and values: it is folded into others, so here it is zero.

    Raises:
        BenchError: the model is no plain BERT.
    """
    sizes = bundle.manifest.architecture
    if sizes.family != "bert":
        raise BenchError(f"{sizes.family} is not bert: give the weights as --checkpoint")
    weights = _Weights(bundle.path / bundle.manifest.graph.file)
    tensors = {
        "embeddings.word_embeddings.weight": weights.table(WORD_TABLE),
        "embeddings.position_embeddings.weight": weights["embeddings.position"],
        "embeddings.token_type_embeddings.weight": weights["embeddings.token_type"],
        "embeddings.LayerNorm.weight": weights["embeddings.norm.weight"],
        "embeddings.LayerNorm.bias": weights["embeddings.norm.bias"],
    }
    for number in range(sizes.layers):
        ours, theirs = f"layers.{number}", f"encoder.layer.{number}"
        for name, other in _LAYER.items():
            smoothing = f"{ours}.{_SMOOTHED_WITH.get(name, name)}.smoothing"
            matrix = weights.matrix(f"{ours}.{name}.weight", smoothing)
            bias = weights.get(f"{ours}.{_BIAS.get(name, name)}.bias")
            tensors[f"{theirs}.{other}.weight"] = np.ascontiguousarray(matrix.T)
            tensors[f"{theirs}.{other}.bias"] = (
                np.zeros(matrix.shape[1], np.float32) if bias is None else bias
            )
        for norm, other in (("attention_norm", "attention.output"), ("output_norm", "output")):
            for part in ("weight", "bias"):
                tensors[f"{theirs}.{other}.LayerNorm.{part}"] = weights[f"{ours}.{norm}.{part}"]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": len(tensors["encoder.layer.0.intermediate.dense.bias"]),
        "max_position_embeddings": sizes.max_positions,
        "type_vocab_size": sizes.type_vocab_size,
        "layer_norm_eps": weights.epsilon,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(bundle.path / bundle.manifest.tokenizer.file, folder / "tokenizer.json")


class _Weights:
    """The weights of an fp32 graph in float32, however they are stored."""

    def __init__(self, graph: Path) -> None:
        loaded = onnx.load(graph).graph
        self._arrays = {each.name: numpy_helper.to_array(each) for each in loaded.initializer}
        norm = next(node for node in loaded.node if node.op_type == "LayerNormalization")
        self.epsilon = next(each.f for each in norm.attribute if each.name == "epsilon")

    def get(self, name: str) -> Array | None:
        """Return a weight stored in float32 or float16; None if the graph has no such weight."""
        stored = self._arrays.get(name, self._arrays.get(f"{name}.fp16"))
        return None if stored is None else stored.astype(np.float32)

    def __getitem__(self, name: str) -> Array:
        weight = self.get(name)
        if weight is None:
            raise BenchError(f"the graph has no weight {name}: give the weights as --checkpoint")
        return weight

    def table(self, name: str) -> Array:
        """Return a table [V, H], which may be stored as integers and steps [V]."""
        if (stored := self.get(name)) is not None:
            return stored
        return self[f"{name}.int8"] * self[f"{name}.steps"][:, None]

    def matrix(self, name: str, smoothing: str) -> Array:
        """Return a matrix [in, out], which may be stored as integers, steps [out] and factors."""
        if (stored := self.get(name)) is not None:
            return stored
        matrix = self[f"{name}.int8"] * self[f"{name}.steps"]
        factors = self.get(smoothing)
        return matrix if factors is None else matrix * factors[:, None]
