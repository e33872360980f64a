"""How long runs of the real engine take, recorded on a shared machine.

Usage: python -m tests.support.world.engine_times: record the table again; this takes a minute

The real scheduler forms batches for the default model: of one client, of four, and of 32 at once,
whose texts have 4 to 512 tokens. A run of a session takes ``fixed + per_token * tokens +
per_pair * sum(length ** 2)`` seconds, times a ratio. The table has these costs, and quantiles of the
ratios of the longer half of the runs: short ones wait for the interpreter, and the world's are long.
"""

import json
import random
import time
from collections.abc import Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.sources import ROOT

TABLE = ROOT / "tests/simulated/engine-times.json"
SESSIONS = ("shared", "alone")
"""The session of all workers, and the one of a lone batch, on all cores."""

_PHASES = ((1, 20.0), (4, 10.0), (32, 20.0))
"""Clients at once, and for how many seconds."""

_RATIOS = 256
_MILLION = 1_000_000


class Session(NamedTuple):
    """The costs of a session, in seconds, and quantiles of its runs' ratios to them."""

    fixed: float
    per_token: float
    per_pair: float
    ratios: Sequence[float]

    def seconds(self, lengths: Sequence[int]) -> float:
        """Return the typical time of a batch of sequences with so many tokens."""
        pairs = sum([length * length for length in lengths])
        return self.fixed + self.per_token * sum(lengths) + self.per_pair * pairs


@cache
def recorded() -> Sequence[Session]:
    """Return the sessions of the table, in the order of `SESSIONS`."""
    rows = json.loads(TABLE.read_text())["sessions"]
    return [
        Session(*(us / _MILLION for us in row["us"]), [each / 1000 for each in row["permille"]])
        for row in map(rows.get, SESSIONS)
    ]


def _measure() -> list[tuple[bool, list[int], float]]:
    """Return whether each run was alone, its lengths, and its seconds."""
    from cloze.model_store.batch import Encoding
    from cloze.model_store.heads import HeadRequest
    from cloze.service.batching.fair_queue import Submission, Terms
    from cloze.service.models.served_models import LocalModels, close_models, onnx_engine, open_bundles
    from cloze.service.settings import Settings

    settings = Settings(model=("cloze-bert",), max_queue_wait_ms=0)  # type: ignore[arg-type]
    rows: list[tuple[bool, list[int], float]] = []

    class Timed:
        """An engine that notes its runs."""

        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> Any:
            began = time.perf_counter()
            outputs = self._engine.run(batch, alone=alone)
            rows.append((alone, [len(each) for each in batch], time.perf_counter() - began))
            return outputs

    models = LocalModels(settings, lambda *asked: Timed(onnx_engine(settings)(*asked))).open(  # type: ignore[arg-type, return-value]
        open_bundles(settings).bundles
    )
    queue, draw = models[0].queue, random.Random(1)

    def ask(until: float) -> None:
        if time.monotonic() < until:
            ids = np.full(int(4 * 128 ** draw.random()), 7, np.int32)
            text = Encoding(ids, np.zeros_like(ids), {"embedding": HeadRequest()})
            asked = Submission(Terms(until + 60.0, str(draw.random())), [text])
            queue.submit(asked)
            asked.add_done_callback(lambda _: ask(until))

    for clients, seconds in _PHASES:
        until = time.monotonic() + seconds
        for _ in range(clients):
            ask(until)
        time.sleep(seconds + 2.0)
    close_models(models)
    return rows


def _fit(rows: Sequence[tuple[list[int], float]]) -> dict[str, Any]:
    """Return the costs of a session, by least squares of the relative errors, and the ratios."""
    terms = np.array([(1, sum(sizes), sum(n * n for n in sizes)) for sizes, _ in rows], float)
    took = np.array([seconds for _, seconds in rows])
    kept = np.ones(len(rows), bool)
    for _ in range(5):  # without the runs that something else has slowed down
        scaled = terms[kept] / took[kept, None]
        costs = np.linalg.lstsq(scaled, np.ones(kept.sum()), rcond=None)[0].clip(0.0)
        kept = np.abs(took / (terms @ costs) - 1) < 0.3
    typical = terms @ costs
    ratios = (took / typical)[typical >= np.median(typical)]
    ratios = np.quantile(ratios, (np.arange(_RATIOS) + 0.5) / _RATIOS)
    return {
        "runs": len(rows),
        "us": [round(float(cost) * _MILLION, 6) for cost in costs],
        "permille": [int(round(ratio * 1000)) for ratio in ratios.tolist()],
    }


def main() -> None:
    """Record the table."""
    rows = _measure()[50:]  # the first runs warm up
    cpu = next(l for l in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in l)
    table = {
        "command": "python -m tests.support.world.engine_times",
        "date": str(date.today()),
        "machine": f"2 cores of a shared host, {cpu.partition(': ')[2]}",
        "model": "cloze-bert",
        "sessions": {
            name: _fit([(sizes, seconds) for alone, sizes, seconds in rows if alone == number])
            for number, name in enumerate(SESSIONS)
        },
    }
    TABLE.write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
