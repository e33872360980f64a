"""The fused residual and LayerNorm of onnxruntime's CPU provider against its parts: decision 0005.

.venv/bin/python bench/skip_layer_norm.py >bench/results/skip-layer-norm-cpu.md
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


def least_us(nodes: list[NodeProto], hidden: int) -> float:
    """Processor time of the quickest of the runs, one thread."""
    shapes = {
        "x": [TOKENS, hidden],
        "skip": [TOKENS, hidden],
        "scale": [hidden],
        "shift": [hidden],
        "bias": [hidden],
    }
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    ]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    best, begin = float("inf"), time.thread_time()
    while time.thread_time() - begin < SECONDS:
        started = time.thread_time()
        session.run(None, feeds)
        best = min(best, time.thread_time() - started)
    return best * 1e6


def main() -> None:
    """Print the table."""
    print(f"# Residual and LayerNorm on a CPU, onnxruntime {ort.__version__}\n")
    print("    .venv/bin/python bench/skip_layer_norm.py\n")
    print(
        f"{TOKENS} tokens, one thread, 2 cores of an AMD EPYC with avx512_vnni; the quickest run of half a second, in us.\n"
    )
    print("| hidden size | `SkipLayerNormalization` | `Sum`, `LayerNormalization` |\n|---|---|---|")
    for hidden in (256, 384, 768):
        print(f"| {hidden} | {least_us(FUSED, hidden):.0f} | {least_us(PARTS, hidden):.0f} |")


if __name__ == "__main__":
    main()
