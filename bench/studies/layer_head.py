"""The cost of the head of layers in runs that do not ask for it, and in runs that do (decision 16).

python bench/studies/layer_head.py CHECKPOINT
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Bundle, Store
from cloze.model_store.batch import BatchCodec, Encoding
from cloze.model_store.heads import HeadRequest, Pooling
from cloze.model_store.heads.layer_embedding import LayerEmbeddingRequest
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Precision

_BATCHES = ((1, 14), (8, 14), (4, 128))
_RUNS = 25
_LARGE_BATCH = (32, 128)


def _session(bundle: Bundle, file: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(bundle.file(file), options, providers=["CPUExecutionProvider"])


def _batch(size: int, length: int, request: dict[str, HeadRequest]) -> list[Encoding]:
    ids = np.random.default_rng(0).integers(1000, 20_000, (size, length)).astype(np.int32)
    return [Encoding(row, np.zeros_like(row), request) for row in ids]


def _measure_times(plain: Bundle, layered: Bundle) -> None:
    """Print the lowest time of each kind of run in ms; the kinds take turns."""
    layers = layered.manifest.architecture.layers
    embedding: dict[str, HeadRequest] = {"embedding": HeadRequest()}
    asked: dict[str, HeadRequest] = {
        "layer_embedding": LayerEmbeddingRequest([{layers: 1.0}], Pooling.MEAN)
    }
    kinds = {"without": (plain, embedding), "with": (layered, embedding), "asked": (layered, asked)}
    print("graph, texts x tokens: without the head, with it, asking for it, in ms")
    for file in ("dense.onnx", "dense-int8.onnx"):
        for size, length in _BATCHES:
            runs = {}
            for name, (bundle, request) in kinds.items():
                codec = BatchCodec(bundle.manifest.graph_spec(Layout.DENSE))
                batch = _batch(size, length, request)
                packed = codec.pack(batch)
                runs[name] = (_session(bundle, file), packed.outputs, packed.feeds)
            lowest = dict.fromkeys(runs, float("inf"))
            for _ in range(_RUNS):
                for name, (session, outputs, feeds) in runs.items():
                    started = time.perf_counter()
                    session.run(outputs, feeds)
                    lowest[name] = min(lowest[name], (time.perf_counter() - started) * 1e3)
            figures = ", ".join(f"{milliseconds:.2f}" for milliseconds in lowest.values())
            print(f"{file}, {size} x {length}: {figures}", flush=True)


def _print_memory(store: str, name: str) -> None:
    """Print the largest memory of this process, in MB, after a large batch of an fp32 graph."""
    bundle = Store(Path(store)).open(name)
    codec = BatchCodec(bundle.manifest.graph_spec(Layout.DENSE))
    batch = _batch(*_LARGE_BATCH, {"embedding": HeadRequest()})
    packed = codec.pack(batch)
    _session(bundle, "dense.onnx").run(packed.outputs, packed.feeds)
    status = Path("/proc/self/status").read_text()
    megabytes = int(status.split("VmHWM:")[1].split()[0]) // 1000
    print(f"{name}: {megabytes} MB after {_LARGE_BATCH[0]} x {_LARGE_BATCH[1]} tokens", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Export both bundles and measure them; or, with two arguments, print one bundle's memory."""
    if len(arguments) == 2:
        _print_memory(*arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        bundles = [
            export(arguments[0], name, store, ExportOptions(tasks, precisions=(Precision.INT8,)))
            for name, tasks in (("without", ("embed",)), ("with", ("embed", "embed-layers")))
        ]
        _measure_times(*bundles)
        for bundle in bundles:
            command = [sys.executable, __file__, folder, bundle.manifest.name]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
