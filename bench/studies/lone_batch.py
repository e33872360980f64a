"""Threads of a run alone and of runs side by side (decision 13), and the cost of a text by batch.

python bench/studies/lone_batch.py model_store/bundles/NAME/1/dense.onnx
"""

import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

_CONFIGURATIONS = {
    "1 thread": (1, False, True),
    "2 threads that sleep": (2, False, True),
    "2 threads that spin": (2, True, True),
    "2 threads that spin, not packed": (2, True, False),
}
"""Threads per run, whether they spin during a run, and whether weights are packed."""

_LENGTHS = (14, 40, 180)
_LOADS = ((8, 14), (4, 180))
_BATCHES = (1, 2, 4, 8, 16)
_RUNS, _LOAD_S, _LOAD_TURNS = 40, 3.0, 3

Feeds = dict[str, np.ndarray]


def _open(graph: str, threads: int, *, spin: bool, packed: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.disable_prepacking", str(int(not packed)))
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _feeds(session: ort.InferenceSession, batch: int, length: int) -> Feeds:
    ids = np.random.default_rng(0).integers(1000, 20_000, (batch, length)).astype(np.int32)
    feeds = {}
    for tensor in session.get_inputs():
        shape = [batch if isinstance(size, str) else size for size in tensor.shape]
        by_name = {"input_ids": ids, "token_type_ids": np.zeros_like(ids)}
        feeds[tensor.name] = by_name.get(tensor.name, np.zeros(shape, np.int32))
    return feeds


def _lone_ms(sessions: dict[str, ort.InferenceSession], length: int) -> dict[str, float]:
    """Return the lowest time of a text in ms, per session; the sessions take turns."""
    lowest = dict.fromkeys(sessions, float("inf"))
    feeds = _feeds(next(iter(sessions.values())), 1, length)
    for _ in range(_RUNS):
        for name, session in sessions.items():
            started = time.perf_counter()
            session.run(None, feeds)
            lowest[name] = min(lowest[name], (time.perf_counter() - started) * 1e3)
    return lowest


def _load(session: ort.InferenceSession, batch: int, length: int) -> tuple[float, float]:
    """Run batches on two threads side by side.

    Returns:
        Texts per second, and milliseconds of a core per text.
    """
    feeds = _feeds(session, batch, length)
    done: list[int] = []
    end = time.perf_counter() + _LOAD_S

    def work() -> None:
        while time.perf_counter() < end:
            session.run(None, feeds)
            done.append(batch)

    busy = time.process_time()
    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / _LOAD_S, (time.process_time() - busy) / sum(done) * 1e3


def measure_sessions(graph: str) -> None:
    """Print a table of the configurations."""
    sessions = {
        name: _open(graph, threads, spin=spin, packed=packed)
        for name, (threads, spin, packed) in _CONFIGURATIONS.items()
    }
    lone = [_lone_ms(sessions, length) for length in _LENGTHS]
    rates: dict[str, list[list[float]]] = {name: [[] for _ in _LOADS] for name in sessions}
    for _ in range(_LOAD_TURNS):
        for number, (batch, length) in enumerate(_LOADS):
            for name, session in sessions.items():
                rates[name][number].append(_load(session, batch, length)[0])
    heads = [f"{n} tokens, ms" for n in _LENGTHS] + [f"{b} x {n}, texts/s" for b, n in _LOADS]
    print(f"| {Path(graph).name} | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for name in sessions:
        cells = [f"{times[name]:.2f}" for times in lone]
        cells += [", ".join(f"{rate:.0f}" for rate in turns) for turns in rates[name]]
        print(f"| {name} | {' | '.join(cells)} |")
    session = sessions["1 thread"]
    costs = [
        min(_load(session, batch, _LENGTHS[0])[1] for _ in range(_LOAD_TURNS)) for batch in _BATCHES
    ]
    print(f"\n| {_LENGTHS[0]} tokens, texts in a batch | {' | '.join(map(str, _BATCHES))} |")
    print(f"|---|{'---|' * len(_BATCHES)}")
    print(f"| ms of a core per text | {' | '.join(f'{cost:.2f}' for cost in costs)} |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    measure_sessions(sys.argv[1])
