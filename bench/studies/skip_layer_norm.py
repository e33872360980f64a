"""Compares the fused residual and LayerNorm of onnxruntime's CPU provider with its parts.

    python bench/studies/skip_layer_norm.py >bench/results/skip-layer-norm-cpu.md

Decision 0005 depends on the result.
"""

import os
import time

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import numpy as np
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper

TOKENS, SECONDS = 512, 0.5
FUSED = [
    helper.make_node(
        "SkipLayerNormalization",
        ["x", "skip", "scale", "shift", "bias"],
        ["y"],
        domain="com.microsoft",
    )
]
PARTS = [
    helper.make_node("Sum", ["x", "skip", "bias"], ["t"]),
    helper.make_node("LayerNormalization", ["t", "scale", "shift"], ["y"]),
]


def fastest_us(nodes: list[NodeProto], hidden: int) -> float:
    """Return the processor time of the fastest run on one thread, in microseconds."""
    session = _session(nodes, hidden)
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in _shapes(hidden).items()
    }
    fastest, begin = float("inf"), time.thread_time()
    while time.thread_time() - begin < SECONDS:
        started = time.thread_time()
        session.run(None, feeds)
        fastest = min(fastest, time.thread_time() - started)
    return fastest * 1e6


def _shapes(hidden: int) -> dict[str, list[int]]:
    rows, vector = [TOKENS, hidden], [hidden]
    return {"x": rows, "skip": rows, "scale": vector, "shift": vector, "bias": vector}


def _session(nodes: list[NodeProto], hidden: int) -> ort.InferenceSession:
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in _shapes(hidden).items()
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Print the table."""
    print(f"# Residual and LayerNorm on a CPU, onnxruntime {ort.__version__}\n")
    print("    python bench/studies/skip_layer_norm.py\n")
    print(
        f"{TOKENS} tokens, one thread, 2 cores of an AMD EPYC with avx512_vnni; "
        "the fastest run of half a second, in us.\n"
    )
    print("| hidden size | `SkipLayerNormalization` | `Sum`, `LayerNormalization` |\n|---|---|---|")
    for hidden in (256, 384, 768):
        print(f"| {hidden} | {fastest_us(FUSED, hidden):.0f} | {fastest_us(PARTS, hidden):.0f} |")


if __name__ == "__main__":
    main()
