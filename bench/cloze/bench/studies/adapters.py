"""What do adapters cost: time per batch beside the plain graph, and memory for 1, 10, 100 of them?

    python bench/studies/adapters.py BASE [--precision int8] [--rank 8]

BASE is the folder of a bundle that takes adapters. Each sequence of a batch has another adapter.
*tables* is what the server does: one run, with the matrices gathered per sequence. The two others
run once per adapter: with the matrices as inputs, or with the plain graph on merged weights.
Processor time of one thread, medians of turns; ratios hold on a machine that does other work too.
"""

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from cloze.model_store import Bundle
from cloze.model_store.adapter import Adapter
from cloze.model_store.adapter_section import AdapterSupport
from cloze.model_store.batch import Encoding
from cloze.model_store.heads.head import HeadRequest
from cloze.model_store.manifest import Manifest, Precision
from cloze.model_store.peft import LowRank
from cloze.service.core import Device
from cloze.service.engine.onnx_engine import OnnxEngine, SessionOptions

BATCHES = ((1, 16), (4, 16), (8, 16), (1, 128), (4, 128))
COUNTS = (1, 10, 100)
TURNS = 40


def random_adapter(support: AdapterSupport, rank: int, seed: int) -> Adapter:
    """Return an adapter with random matrices on every layer that the base lets adapters change."""
    rng = np.random.default_rng(seed)

    def draw(width: int) -> np.ndarray:
        return rng.normal(0, 0.02, (rank, width)).astype(np.float32)

    layers = {
        number: LowRank(draw(layer.inputs), draw(layer.outputs))
        for layer in support.layers.values()
        for number in layer.numbers
    }
    return Adapter(rank, layers, None, {}, None, str(seed))


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def encodings(head: str, count: int, tokens: int, adapters: int) -> list[Encoding]:
    """Return random sequences of adapters in turn; of none, if there are 0 of them."""
    rng = np.random.default_rng(0)
    return [
        Encoding(
            rng.integers(5, 1000, tokens).astype(np.int32),
            np.zeros(tokens, np.int32),
            {head: HeadRequest()},
            f"adapter-{number % adapters}" if adapters else "",
        )
        for number in range(count)
    ]


def processor_seconds(run: Callable[[], object]) -> float:
    """Return the processor time of this thread for a call."""
    before = time.thread_time()
    run()
    return time.thread_time() - before


def run_apart(engine: OnnxEngine, batch: list[Encoding]) -> None:
    """Run each sequence of a batch alone."""
    for encoding in batch:
        engine.run([encoding])


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "int8"])
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()
    manifest = Manifest.from_bytes((options.base / "manifest.json").read_bytes())
    assert manifest.adapters is not None, "the bundle takes no adapters"
    support, head = manifest.adapters, manifest.graph_heads[0].name
    before = resident_bytes()
    engine = OnnxEngine(
        Bundle(manifest, options.base),
        Device.CPU,
        Precision(options.precision),
        options=SessionOptions(adapter_bytes=2**30),
    )
    print(f"memory of the engine: {(resident_bytes() - before) / 1e6:.0f} MB")
    loaded = engine.adapters
    assert loaded is not None
    own = random_adapter(support, options.rank, 0).size
    for number in range(max(COUNTS)):
        loaded.add(f"adapter-{number}", partial(random_adapter, support, options.rank, number))
    engine.run(encodings(head, 1, 16, 0))
    start = resident_bytes()
    print(
        f"\n| adapters of {own / 1e6:.2f} MB | MB more | per adapter's own bytes |\n|---|---|---|"
    )
    for count in COUNTS:
        for one in encodings(head, count, 16, count):
            engine.run([one])
        more = resident_bytes() - start
        print(f"| {count} | {more / 1e6:.1f} | {more / (count * own):.2f} |")
    print("\n| texts x tokens | plain ms | tables | one adapter per run | merged weights |")
    print("|---|---|---|---|---|")
    for count, tokens in BATCHES:
        plain = encodings(head, count, tokens, 0)
        adapted = encodings(head, count, tokens, 100)
        ways: list[Callable[[], object]] = [
            partial(engine.run, plain),
            partial(engine.run, adapted),
            partial(run_apart, engine, adapted),
            partial(run_apart, engine, plain),
        ]
        seconds = np.median([[processor_seconds(way) for way in ways] for _ in range(TURNS)], 0)
        ratios = " | ".join(f"{one / seconds[0]:.2f}" for one in seconds[1:])
        print(f"| {count} x {tokens} | {1000 * seconds[0]:.2f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
