"""Measures engines on the same weights and batches, in turns; each engine is a process."""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer

from cloze.bench.errors import BenchError
from cloze.bench.report import markdown
from cloze.model_store import Store
from cloze.tables import report

_PRECISIONS = {
    "cloze": ("fp32", "int8"),
    "onnxruntime": ("fp32", "int8"),
    "openvino": ("fp32", "bf16", "int8"),
    "openvino-streams": ("fp32", "bf16", "int8"),
    "ctranslate2": ("fp32", "int8"),
}
ENGINES = tuple(f"{name} {kind}" for name, kinds in _PRECISIONS.items() for kind in kinds)
"""Engine and precision, in the order of the tables."""

_APP = Path(__file__).parent / "apps" / "engine_app.py"


@dataclass(frozen=True, slots=True)
class EnginesPlan:
    """What ``cloze bench engines`` measures.

    Attributes:
        work: a Hugging Face folder, to which engines write what they make of the weights.
        python: interpreter of the environment of the other engines.
        seconds: least duration of the runs of one engine and shape in one round.
        pairs: CSV file of scored sentence pairs, for the quality; None: it is not measured.
    """

    model: str
    model_store: Path
    work: Path
    python: str
    engines: tuple[str, ...]
    threads: tuple[int, ...]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    rounds: int
    seconds: float
    pairs: Path | None


def measure_engines(plan: EnginesPlan) -> str:
    """Return a table per number of threads, with the medians of the rounds.

    An engine that does not start is left out, with its reason below the tables.
    """
    from cloze.export.measure.pairs import read_pairs, tokenize_pairs
    from cloze.export.measure.texts import SENTENCES

    bundle = Store(plan.model_store).open(plan.model)
    place = [str(plan.model_store.resolve()), plan.model]
    (plan.work / "bundle.json").write_text(json.dumps(place))
    tokenizer = Tokenizer.from_file(str(bundle.file(bundle.manifest.tokenizer.file)))
    ids = [each.ids for each in tokenizer.encode_batch(list(SENTENCES))]
    (plan.work / "calibration.json").write_text(json.dumps(ids))
    shapes, lines = list(product(plan.batches, plan.lengths)), list[str]()
    quality, left_out = dict[str, float](), set[str]()
    for threads in plan.threads:
        with ExitStack() as stack:
            running = dict[str, _Engine]()
            for engine in plan.engines:
                process = stack.enter_context(_Engine(plan, engine, threads))
                try:
                    process.answer()
                    running[engine] = process
                except BenchError as error:
                    left_out.add(f"- {engine} is left out: {error}")
                    report(f"{engine} is left out: {error}")
            if plan.pairs is not None and not quality:
                rows = tokenize_pairs(
                    read_pairs([plan.pairs]), tokenizer, bundle.manifest.limits.max_tokens
                )
                quality = _quality(rows, plan.work, running)
            times: dict[str, list[float]] = {engine: [] for engine in running}
            for shape in shapes:
                request = {"shape": shape, "seconds": plan.seconds}
                rounds = [
                    {engine: process.ask(request) for engine, process in running.items()}
                    for _ in range(1 + plan.rounds)  # the first one warms up
                ]
                for engine, some in times.items():
                    some.append(statistics.median(each[engine] for each in rounds[1:]))
                    report(f"{threads} threads, {shape}, {engine}: {some[-1]:.2f} ms")
        lines += _table(threads, shapes, times, quality)
    return "\n".join([*lines, *sorted(left_out)])


class _Engine:
    """A process with an engine, suspended while others run: its threads may go on spinning."""

    def __init__(self, plan: EnginesPlan, engine: str, threads: int) -> None:
        python = sys.executable if engine.startswith("cloze") else plan.python
        self._log = plan.work / f"{engine}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                (python, str(_APP), str(plan.work), engine, str(threads)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __enter__(self) -> "_Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, request: Mapping[str, object]) -> float:
        """Return the number that the engine answers; see `answer_lines`."""
        assert self._process.stdin is not None
        psutil.Process(self._process.pid).resume()
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return float(self.answer())

    def answer(self) -> str:
        """Wait for a line; raise a BenchError with the last line of the log if there is none."""
        assert self._process.stdout is not None
        if not (answer := self._process.stdout.readline()):
            lines = self._log.read_text().splitlines() or ["no reason"]
            raise BenchError(lines[-1][:200])
        psutil.Process(self._process.pid).suspend()
        return answer


def _quality(
    rows: Sequence[tuple[Any, ...]], work: Path, running: Mapping[str, _Engine]
) -> dict[str, float]:
    """Return the rank correlation of each engine's cosines with the scores of pairs."""
    from cloze.export.measure.metrics import spearman

    request = {"ids": str(work / "pairs.json"), "out": str(work / "pairs.npy")}
    ids = [each for first, second, _ in rows for each in (first, second)]
    Path(request["ids"]).write_text(json.dumps(ids))
    figures = {}
    for engine, process in running.items():
        process.ask(request)
        vectors = np.load(request["out"])
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        cosines = (vectors[::2] * vectors[1::2]).sum(1)
        figures[engine] = spearman(cosines, [score for *_, score in rows])
    return figures


def _table(
    threads: int,
    shapes: list[tuple[int, int]],
    times: Mapping[str, list[float]],
    quality: Mapping[str, float],
) -> list[str]:
    """Return rows; the last ones divide our times by the best of others, fp32 by fp32."""
    rows = []
    for engine, ms in times.items():
        rho = f"{quality[engine]:.4f}" if engine in quality else ""
        rows.append([engine, *(f"{each:.3g}" for each in ms), rho])
    for precision, compared in (("fp32", "fp32"), ("int8", "")):
        others = [ms for e, ms in times.items() if "cloze" not in e and e.endswith(compared)]
        if others and (ours := times.get(f"cloze {precision}")):
            ratios = np.array(ours) / np.min(others, axis=0)
            name = f"cloze {precision} over the best other"
            rows.append([name, *(f"{each:.2f}" for each in ratios), ""])
    titles = [f"{threads} threads, ms", *(f"{b} x {s}" for b, s in shapes), "Spearman"]
    return markdown(titles, rows)
