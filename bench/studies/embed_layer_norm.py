"""Compares the fused embeddings of onnxruntime's CPU provider with their parts.

    python bench/studies/embed_layer_norm.py >bench/results/embed-layer-norm-cpu.md

The word table is stored as integers. The fused operator needs a table of floats, which the runtime
computes when it opens the graph; the parts convert only the rows that they read. Decision 0005
depends on the result.
"""

import os
import time
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

WORDS, HIDDEN, POSITIONS, SECONDS = 30_522, 384, 512, 0.5
SHAPES = ((1, 8), (1, 16), (1, 128), (1, 512), (16, 128))
FUSED = [
    helper.make_node("Cast", ["integers"], ["floats"], to=TensorProto.FLOAT),
    helper.make_node("Unsqueeze", ["steps", "last"], ["column"]),
    helper.make_node("Mul", ["floats", "column"], ["table"]),
    helper.make_node(
        "EmbedLayerNormalization",
        ["ids", "types", "table", "positions", "type_table", "scale", "shift"],
        ["y", "mask"],
        domain="com.microsoft",
    ),
]
PARTS = [
    helper.make_node("Gather", ["integers", "ids"], ["rows"]),
    helper.make_node("Gather", ["steps", "ids"], ["row_steps"]),
    helper.make_node("Cast", ["rows"], ["floats"], to=TensorProto.FLOAT),
    helper.make_node("Unsqueeze", ["row_steps", "last"], ["column"]),
    helper.make_node("Mul", ["floats", "column"], ["words"]),
    helper.make_node("Gather", ["type_table", "types"], ["type_rows"]),
    helper.make_node("Shape", ["ids"], ["length"], start=1),
    helper.make_node("Slice", ["positions", "first", "length"], ["position_rows"]),
    helper.make_node("Sum", ["words", "type_rows", "position_rows"], ["sum"]),
    helper.make_node("LayerNormalization", ["sum", "scale", "shift"], ["y"]),
]


def session(nodes: list[NodeProto]) -> ort.InferenceSession:
    """Open a graph of these nodes on one thread."""
    rng = np.random.default_rng(0)
    weights: dict[str, NDArray[Any]] = {
        "integers": rng.integers(-127, 128, (WORDS, HIDDEN)).astype(np.int8),
        "steps": rng.random(WORDS).astype(np.float32) / 127,
        "positions": rng.random((POSITIONS, HIDDEN)).astype(np.float32),
        "type_table": rng.random((2, HIDDEN)).astype(np.float32),
        "scale": rng.random(HIDDEN).astype(np.float32),
        "shift": rng.random(HIDDEN).astype(np.float32),
        "first": np.array([0]),
        "last": np.array([-1]),
    }
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT32, ["B", "S"])
        for name in ("ids", "types")
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def fastest_us(opened: ort.InferenceSession, shape: tuple[int, int]) -> float:
    """Return the processor time of the fastest run, in microseconds."""
    ids = np.random.default_rng(0).integers(0, WORDS, shape).astype(np.int32)
    feeds = {"ids": ids, "types": np.zeros_like(ids)}
    fastest, begin = float("inf"), time.thread_time()
    while time.thread_time() - begin < SECONDS:
        started = time.thread_time()
        opened.run(["y"], feeds)
        fastest = min(fastest, time.thread_time() - started)
    return fastest * 1e6


def main() -> None:
    """Print the table."""
    print(f"# Embeddings on a CPU, onnxruntime {ort.__version__}\n")
    print("    python bench/studies/embed_layer_norm.py\n")
    print(
        f"The table shows the fastest run in half a second, in us, for {WORDS:,} words of {HIDDEN} "
        "numbers,\nstored as integers, on one thread of 2 cores of an AMD EPYC with avx512_vnni.\n"
    )
    print("| sequences x tokens | `EmbedLayerNormalization` | its parts |\n|---|---|---|")
    fused, parts = session(FUSED), session(PARTS)
    for shape in SHAPES:
        times = [f"{fastest_us(opened, shape):.0f}" for opened in (fused, parts)]
        print(f"| {shape[0]} x {shape[1]} | {' | '.join(times)} |")


if __name__ == "__main__":
    main()
