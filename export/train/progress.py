"""What a run shows: a progress bar, a JSONL log, and a PNG of its curves."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from export.train.errors import TrainError

LOG = "log.jsonl"
CURVES = "curves.png"

_CONTENDED = 0.75
"""Share of its threads' time below which other work takes the processor; undisturbed, runs measured 0.9 and more."""

_NOT_DRAWN = frozenset({"step", "seconds", "tokens_seen", "tokens_per_second", "cpu_share"})


class Progress:
    """A bar on standard error and a line in the log every so often.

    Args:
        folder: of the run.
        step: where the run starts or goes on; later lines of an earlier try are dropped from the log.
        steps: where it ends.
        threads: how many compute on the CPU; None: the CPU does not compute.
    """

    def __init__(self, folder: Path, step: int, steps: int, *, threads: int | None = None) -> None:
        self._file = folder / LOG
        kept = [line for line in read_log(folder) if line["step"] <= step]
        new = folder / f"{LOG}.new"
        new.write_text("".join(json.dumps(line) + "\n" for line in kept))
        new.replace(self._file)
        self._started = time.monotonic() - (kept[-1]["seconds"] if kept else 0.0)
        self._tokens_seen = kept[-1]["tokens_seen"] if kept else 0
        self._last = (time.monotonic(), self._tokens_seen)
        self._threads, self._last_cpu = threads, time.process_time()
        self._bar = tqdm(
            initial=step,
            total=steps,
            unit="step",
            file=sys.stderr,
            dynamic_ncols=True,
            mininterval=1.0 if sys.stderr.isatty() else 30.0,
        )

    def advance(self, tokens: int) -> None:
        """A step over so many tokens is done."""
        self._tokens_seen += tokens
        self._bar.update()

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Write a line; ``figures`` are what the objective reports, means since the last line."""
        now = time.monotonic()
        rate = (self._tokens_seen - self._last[1]) / max(now - self._last[0], 1e-9)
        cpu_share = self._cpu_share(now - self._last[0])
        self._last = (now, self._tokens_seen)
        line: dict[str, float] = {
            "step": step,
            "seconds": round(now - self._started, 1),
            "tokens_seen": self._tokens_seen,
            "tokens_per_second": round(rate),
        }
        if cpu_share is not None:
            line["cpu_share"] = round(cpu_share, 2)
        line |= {name: round(value, 6) for name, value in figures.items()}
        with self._file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        shown = {
            name: f"{value:.3f}" for name, value in figures.items() if name in ("loss", "accuracy")
        }
        shown["tokens/s"] = f"{rate:,.0f}"
        if cpu_share is not None and cpu_share < _CONTENDED:
            shown["contended"] = f"{cpu_share:.0%} of {self._threads} threads"
        self._bar.set_postfix(shown, refresh=False)

    def _cpu_share(self, seconds: float) -> float | None:
        """Return the CPU time of this process since the last line, as a share of what its threads could have used."""
        cpu = time.process_time()
        used, self._last_cpu = cpu - self._last_cpu, cpu
        return None if self._threads is None else used / max(seconds * self._threads, 1e-9)

    def close(self) -> None:
        """End the bar."""
        self._bar.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; one that a kill or a full disk cut short is left out."""
    file = folder / LOG
    lines = []
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and {"step", "seconds", "tokens_seen"} <= entry.keys():
            lines.append(entry)
    return lines


def draw_curves(folder: Path) -> Path:
    """Draw every figure of the log over the steps, losses and shares apart."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise TrainError("curves need matplotlib; install cloze[train]") from error
    lines = read_log(folder)
    names = sorted({name for line in lines for name in line} - _NOT_DRAWN)
    losses = [name for name in names if "loss" in name]
    shares = [
        name
        for name in names
        if name not in losses and name not in ("learning_rate", "gradient_norm")
    ]
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, chosen, title in zip(
        figure.subplots(1, 2), (losses, shares), ("loss", "accuracy"), strict=True
    ):
        for name in chosen:
            points = [(line["step"], line[name]) for line in lines if name in line]
            axes.plot(*zip(*points, strict=True), label=name.replace("_", " "))
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if chosen:
            axes.legend()
    figure.savefig(folder / CURVES, dpi=110)
    return folder / CURVES
