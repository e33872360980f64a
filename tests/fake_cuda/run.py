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

folder = tempfile.TemporaryDirectory()
LOG = f"{folder.name}/log"
os.environ["FAKE_CUDA_LOG"] = LOG
libraries = {
    file.name: ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
    for file in Path(sys.argv[1]).glob("lib*.so.*[0-9]")
}

import numpy as np
import onnxruntime as ort

from cloze.model_store import Store
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs
from cloze.service.core import MAX_PADDING_FACTOR
from cloze.service.engine import session
from cloze.service.engine.session import DeviceSession, cuda_session
from cloze.service.models.served_models import batch_tokens
from cloze.service.settings import Settings
from tests.support.encodings import encoding
from tests.support.fake_engine import FakeEngine
from tests.support.profiling import placed, profiled

LENGTHS = (9, 30, 3)
MIXES = 200


def make_batch(tasks: set[str], lengths: tuple[int, ...] = LENGTHS) -> list[Encoding]:
    """Return a batch in which every encoding asks `tasks`; only the first asks two masks."""
    return [
        encoding(
            [7] * length,
            masks=[1, 2] if "fill-mask" in tasks and not number else (),
            top_k=3 if "fill-mask" in tasks and not number else 0,
            targets=[5] if "fill-mask" in tasks and not number else (),
            pair="nsp" in tasks,
            embed="embed" in tasks,
            span="qa" in tasks,
        )
        for number, length in enumerate(lengths)
    ]


def mixes(longest: int, budget: int) -> Iterator[tuple[int, ...]]:
    """Lengths of random batches as the scheduler cuts them: some of all lengths, some of one long
    sequence beside short ones.
    """
    rng = np.random.default_rng(0)
    for _ in range(MIXES):
        usual = rng.integers(4, longest + 1)
        lengths = [longest]
        while sum(lengths) < budget and len(lengths) * longest < MAX_PADDING_FACTOR * budget:
            lengths.append(int(rng.integers(3, usual)))
        yield tuple(lengths[:-1])


class AsEngine(FakeEngine):
    """As much of one as a start asks for."""

    supports_varlen = True

    def __init__(self, play: Callable[[list[Encoding]], object]) -> None:
        super().__init__()
        self.play = play

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        self.play(list(batch))
        return []


def main() -> None:
    bundle = Store(Path(sys.argv[2])).open(sys.argv[3])
    manifest = bundle.manifest
    assert manifest.fp16 is not None
    ort.preload_dlls = lambda: None  # they are ours
    used = next(
        library for name, library in libraries.items() if name.startswith("libcudart")
    ).fake_cuda_used
    used.restype = ctypes.c_size_t
    session._options = profiled(LOG)
    on_cuda: DeviceSession = cuda_session(bundle.file(manifest.fp16.graph.file), 0, 0)
    codec = BatchCodec(manifest.graph_spec(manifest.fp16.graph.layout))

    def run(batch: list[Encoding]) -> dict[str, Any]:
        Path(LOG).write_text("")
        packed = codec.pack(batch)
        outputs = packed.outputs
        found = on_cuda.run(outputs, packed.feeds)
        told = [line.split(" ") for line in Path(LOG).read_text().splitlines()]
        return {
            "shapes": {name: array.shape for name, array in zip(outputs, found, strict=True)},
            "launches": Counter(words[-1] for words in told if words[0] == "launch"),
            "impossible": [words[-1] for words in told if words[0] == "impossible"],
            "to device": sum(line[:2] == ["to", "device"] for line in told),
            "to host": sum(line[:2] == ["to", "host"] for line in told),
        }

    tasks = set(manifest.tasks)
    run(make_batch(tasks))  # gets its buffers
    batches = {
        " ".join(sorted(asked)): run(make_batch(asked))
        for asked in (tasks, *({task} for task in tasks), set[str]())
    }
    longest = manifest.limits.max_tokens
    budget = batch_tokens(bundle, AsEngine(run), Settings())
    before = used()
    for lengths in mixes(longest, budget):
        run(make_batch({"embed", "qa"} & tasks, lengths))
    grown = used() - before
    profile = Path(on_cuda._session.end_profiling())
    print(
        json.dumps(
            {"placed": placed([profile]), "batches": batches, "held": before, "grown": grown}
        )
    )


if __name__ == "__main__":
    main()
