"""What a processor permits at best: the floor of one text through a bundle's encoder.

    python bench/studies/limits.py BUNDLE [--tokens 14 128] [--model-store FOLDER]

Every run reads the weights of all layers once and multiplies each by each token. So a text takes at
least the time that the weights take from memory, if they are not in a cache, and at least that of
the multiplications at the rate of one large product. Both are measured here, with onnxruntime's own
products and a thread per core, and then the graph itself, in the session of a lone request.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from cloze.model_store import Bundle, Store
from cloze.model_store.batch import Encoding
from cloze.model_store.heads.embedding import EmbeddingRequest
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.model_store.manifest import Precision
from cloze.service.core import Device
from cloze.service.engine.onnx_engine import OnnxEngine, SessionOptions
from cloze.service.machine import available_cpus

ROWS, SIZE = 2048, 1024
"""A product that is large enough for the best rate, and whose weights fit in a cache."""

READ_BYTES = 2**29
ROUNDS = 15


def multiplied_weights(graph: Path) -> int:
    """Return the number of weights by which a graph multiplies each token."""
    parts = onnx.load(graph, load_external_data=False).graph
    sizes = {
        each.name: int(np.prod(each.dims)) for each in parts.initializer if len(each.dims) == 2
    }
    products = [node for node in parts.node if node.op_type in ("MatMul", "Gemm")]
    return sum(sizes.get(node.input[1], 0) for node in products)


def best_s(run: Callable[[], object]) -> float:
    """Return the least seconds of a run."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def read_rate(threads: int) -> float:
    """Return the bytes per second that all cores together read from memory."""
    parts = np.array_split(np.ones(READ_BYTES // 8), threads)
    with ThreadPoolExecutor(threads) as pool:
        return READ_BYTES / best_s(lambda: list(pool.map(np.max, parts)))


def product_rate(threads: int, *, int8: bool) -> float:
    """Return the multiplications per second of one large product."""
    kinds = (TensorProto.UINT8, TensorProto.INT32) if int8 else (TensorProto.FLOAT,) * 2
    weights = np.random.default_rng(0).integers(-127, 127, (SIZE, SIZE))
    operator = "MatMulInteger" if int8 else "MatMul"
    graph = helper.make_graph(
        [helper.make_node(operator, ["rows", "weights"], ["result"])],
        "product",
        [helper.make_tensor_value_info("rows", kinds[0], [ROWS, SIZE])],
        [helper.make_tensor_value_info("result", kinds[1], [ROWS, SIZE])],
        [numpy_helper.from_array(weights.astype(np.int8 if int8 else np.float32), "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options)
    rows = np.ones((ROWS, SIZE), np.uint8 if int8 else np.float32)
    return ROWS * SIZE * SIZE / best_s(partial(session.run, None, {"rows": rows}))


def graph_s(bundle: Bundle, precision: Precision, tokens: int, threads: int) -> float:
    """Return the median seconds of one text in the session of a lone request."""
    options = SessionOptions(alone_threads=threads)
    engine = OnnxEngine(bundle, Device.CPU, precision, options=options)
    ids = np.random.default_rng(0).integers(1000, 2000, tokens).astype(np.int32)
    encoding = Encoding(ids, np.zeros(tokens, np.int32), {"embedding": EmbeddingRequest()})
    times = []
    for _ in range(20 * ROUNDS):
        started = time.perf_counter()
        engine.run([encoding], alone=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Print the floors and the graph's time for each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--tokens", type=int, nargs="+", default=[14, 128])
    parser.add_argument("--model-store", type=Path, default=DEFAULT_ROOT)
    arguments = parser.parse_args()
    bundle = Store(arguments.model_store).open(arguments.bundle)
    threads = available_cpus()
    graph = bundle.manifest.graph_of(Precision.FP32)
    assert graph is not None
    weights = multiplied_weights(bundle.path / graph.file)
    reads = read_rate(threads)
    print(f"{weights / 1e6:.1f} M weights in the layers; {reads / 1e9:.1f} GB/s from memory")
    print(
        "| precision | 1e9 products per s | tokens | weights read ms | products ms | the graph ms |"
    )
    print("|---|---|---|---|---|---|")
    for precision in (Precision.FP32, Precision.INT8):
        is_int8 = precision is Precision.INT8
        products = product_rate(threads, int8=is_int8)
        for tokens in arguments.tokens:
            floors = weights * (1 if is_int8 else 4) / reads, weights * tokens / products
            took = graph_s(bundle, precision, tokens, threads)
            shown = [f"{1000 * seconds:.2f}" for seconds in (*floors, took)]
            print(
                f"| {precision} | {products / 1e9:.0f} | {tokens} |",
                " | ".join(shown),
                "|",
                flush=True,
            )


if __name__ == "__main__":
    main()
