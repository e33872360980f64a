"""Runs a bundle's packed graph on the fake CUDA, in a process of its own: ``python -m tests.fake_cuda.run LIBRARIES STORE NAME``.

Prints JSON: where nodes ran, and for each batch its outputs' shapes and what the device was told meanwhile.
"""

import ctypes
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

LOG = tempfile.mkstemp()[1]
os.environ["FAKE_CUDA_LOG"] = LOG
libraries = {file.name: ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL) for file in Path(sys.argv[1]).glob("lib*.so.*[0-9]")}

import numpy as np
import onnxruntime as ort

from model_store import Store, Task
from service.core import CELLS_A_TOKEN, Output, Query
from service.cost import warm_up
from service.engine import session
from service.engine.feeds import BatchFeeds
from service.engine.session import DeviceSession, cuda_session
from service.fake_engine import FakeEngine

LENGTHS = (9, 30, 3)
LARGEST, MIXES = 4096, 200


def queries(tasks: set[Task], lengths: tuple[int, ...] = LENGTHS) -> list[Query]:
    """All of them ask what is given; the first for two masks."""
    return [
        Query(
            np.full(length, 7, np.int32),
            np.zeros(length, np.int32),
            masks=[1, 2] if Task.FILL_MASK in tasks and not number else (),
            top_k=3 if Task.FILL_MASK in tasks and not number else 0,
            targets=[5] if Task.FILL_MASK in tasks and not number else (),
            pair=Task.NSP in tasks,
            embed=Task.EMBED in tasks,
        )
        for number, length in enumerate(lengths)
    ]


def mixes(longest: int) -> Iterator[tuple[int, ...]]:
    """Lengths of random batches of up to `LARGEST` tokens."""
    rng = np.random.default_rng(0)
    for _ in range(MIXES):
        lengths = rng.integers(3, longest, rng.integers(1, 2 * LARGEST // longest)).tolist()
        while sum(lengths) > LARGEST or len(lengths) * max(lengths) > CELLS_A_TOKEN * LARGEST:  # as the scheduler cuts them
            lengths.pop()
        yield tuple(lengths)


class AsEngine(FakeEngine):
    """As much of one as `warm_up` asks for."""

    def __init__(self, play: Callable[[list[Query]], object]) -> None:
        super().__init__()
        self.play = play

    def run(self, batch: Sequence[Query]) -> list[Output]:
        self.play(list(batch))
        return []


def main() -> None:
    bundle = Store(Path(sys.argv[2])).open(sys.argv[3])
    manifest = bundle.manifest
    assert manifest.fp16 is not None
    ort.preload_dlls = lambda: None  # they are ours
    used = next(library for name, library in libraries.items() if name.startswith("libcudart")).fake_cuda_used
    used.restype = ctypes.c_size_t
    plain = session._options

    def profiled() -> ort.SessionOptions:
        options = plain()
        options.enable_profiling, options.profile_file_prefix = True, LOG
        return options

    session._options = profiled
    on_cuda: DeviceSession = cuda_session(bundle.file(manifest.fp16.graph.file), 0, 0)
    feeds = BatchFeeds(manifest, manifest.fp16.graph.layout)

    def run(batch: list[Query]) -> dict[str, Any]:
        Path(LOG).write_text("")
        outputs = feeds.wanted(batch)
        found = on_cuda.run(outputs, feeds.pack(batch))
        told = [line.split(" ") for line in Path(LOG).read_text().splitlines()]
        return {
            "shapes": {name: array.shape for name, array in zip(outputs, found, strict=True)},
            "launches": Counter(words[-1] for words in told if words[0] == "launch"),
            "impossible": [words[-1] for words in told if words[0] == "impossible"],
            "to device": sum(line[:2] == ["to", "device"] for line in told),
            "to host": sum(line[:2] == ["to", "host"] for line in told),
        }

    tasks = set(manifest.tasks)
    run(queries(tasks))  # gets its buffers
    batches = {" ".join(sorted(asked)): run(queries(asked)) for asked in (tasks, *({task} for task in tasks), set[Task]())}
    longest = manifest.limits.max_tokens
    warm_up(AsEngine(run), longest, LARGEST, embed=Task.EMBED in tasks)
    before = used()
    for lengths in mixes(longest):
        run(queries({Task.EMBED} & tasks, lengths))
    grown = used() - before
    profile = json.loads(Path(on_cuda._session.end_profiling()).read_text())
    nodes = [event["args"] for event in profile if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    placed = Counter(f"{node['provider']} {node['op_name']}" for node in nodes)
    print(json.dumps({"placed": placed, "batches": batches, "held": before, "grown": grown}))


if __name__ == "__main__":
    main()
