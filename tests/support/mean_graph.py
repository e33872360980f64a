"""A graph by hand, whose embedding is the mean of the vectors of the tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.support.task_model import VOCABULARY, manifest

TABLE = np.random.default_rng(0).uniform(-0.5, 0.5, (len(VOCABULARY), 4)).astype(np.float32)


def mean(ids: Sequence[int]) -> list[float]:
    return TABLE[list(ids)].mean(0).tolist()


def write_graph(file: Path, table: NDArray[Any] = TABLE) -> None:
    """Write a graph whose embedding is the mean of the vectors of the tokens."""
    nodes = [
        helper.make_node("Gather", ["embeddings.word", "input_ids"], ["hidden"]),
        helper.make_node("ReduceMean", ["hidden", "axes"], ["pooled"], keepdims=0),
        helper.make_node("Gather", ["pooled", "embed_sequences"], ["embeddings"]),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT32, shape)
        for name, shape in (
            ("input_ids", ["B", "S"]), ("token_type_ids", ["B", "S"]), ("embed_sequences", ["E"]),
        )
    ]  # fmt: skip
    output = helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["E", 4])
    weights = [
        onnx.numpy_helper.from_array(table, "embeddings.word"),
        *(
            onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name)
            for name, shape in manifest(tasks=["embed"]).table_shapes().items()
            if name != "embeddings.word"
        ),
        onnx.numpy_helper.from_array(np.array([1]), "axes"),
    ]
    body = helper.make_graph(nodes, "g", inputs, [output], weights)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save_model(model, str(file))
