"""The visible progress of a run: a progress bar, a JSON Lines log, and a PNG of its curves."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cloze.export.errors import TrainError
from cloze.model_store.installation import install_command
from cloze.model_store.plain_files import replacing

LOG = "log.jsonl"
CURVES = "curves.png"

_CONTENDED = 0.75
"""CPU share below which other processes take processor time; idle machines measured 0.9 or more."""

_BAR = "{percentage:3.0f}% {bar} {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}"
"""Without the steps per second, for which the tokens per second stand: the bar needs the room."""

_NOT_DRAWN = frozenset({"step", "seconds", "tokens_seen", "tokens_per_second", "cpu_share"})


class Progress:
    """A progress bar on standard error, and a log with one entry per interval.

    Args:
        step: number of finished steps; later entries of an earlier attempt are removed from the
            log.
        threads: number of CPU threads that compute; None: a GPU computes.
    """

    def __init__(self, run_dir: Path, step: int, steps: int, *, threads: int | None = None) -> None:
        self._file = run_dir / LOG
        kept = [entry for entry in read_log(run_dir) if entry["step"] <= step]
        with replacing(self._file) as new_file:
            new_file.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        self._started_at = time.monotonic() - (kept[-1]["seconds"] if kept else 0.0)
        self._tokens_seen = kept[-1]["tokens_seen"] if kept else 0
        self._last_entry = (time.monotonic(), self._tokens_seen)
        self._threads, self._last_cpu_seconds = threads, time.process_time()
        self._bar = tqdm(
            initial=step,
            total=steps,
            bar_format=_BAR,
            file=sys.stderr,
            dynamic_ncols=True,
            mininterval=1.0 if sys.stderr.isatty() else 30.0,
        )

    def advance(self) -> None:
        """Count one finished step."""
        self._bar.update()

    def log(self, step: int, figures: dict[str, float], tokens: int) -> None:
        """Append an entry to the log.

        Args:
            figures: means of the objective's figures since the last entry.
            tokens: tokens of all processes since the last entry.
        """
        self._tokens_seen += tokens
        now = time.monotonic()
        last_time, last_tokens = self._last_entry
        rate = (self._tokens_seen - last_tokens) / max(now - last_time, 1e-9)
        cpu_share = self._cpu_share(now - last_time)
        self._last_entry = (now, self._tokens_seen)
        entry: dict[str, float] = {
            "step": step,
            "seconds": round(now - self._started_at, 1),
            "tokens_seen": self._tokens_seen,
            "tokens_per_second": round(rate),
        }
        if cpu_share is not None:
            entry["cpu_share"] = round(cpu_share, 2)
        entry |= {name: round(value, 6) for name, value in figures.items()}
        with self._file.open("a") as stream:
            stream.write(json.dumps(entry) + "\n")
        self._show(figures, rate, cpu_share)

    def _show(self, figures: dict[str, float], rate: float, cpu_share: float | None) -> None:
        shown = {
            name: f"{value:.3f}" for name, value in figures.items() if name in ("loss", "accuracy")
        }
        shown["tokens/s"] = f"{rate:,.0f}"
        if cpu_share is not None and cpu_share < _CONTENDED:
            shown["contended"] = f"{cpu_share:.0%}"
        self._bar.set_postfix(shown, refresh=False)

    def _cpu_share(self, seconds: float) -> float | None:
        """Return the used share of the CPU time that the threads could use since the last entry."""
        cpu_seconds = time.process_time()
        used, self._last_cpu_seconds = cpu_seconds - self._last_cpu_seconds, cpu_seconds
        return None if self._threads is None else used / max(seconds * self._threads, 1e-9)

    def close(self) -> None:
        """Close the progress bar."""
        self._bar.close()


def read_log(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete entries of a run's log.

    A kill or a full disk can leave an incomplete line, which is skipped.
    """
    file = run_dir / LOG
    entries = []
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and {"step", "seconds", "tokens_seen"} <= entry.keys():
            entries.append(entry)
    return entries


def draw_curves(run_dir: Path) -> Path:
    """Draw every figure of the log over the steps: losses in one plot, shares in another.

    Raises:
        TrainError: matplotlib is not installed.
    """
    os.environ.setdefault("MPLBACKEND", "Agg")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        command = install_command("train")
        raise TrainError(f"curves need matplotlib; install it with: {command}") from error
    entries = read_log(run_dir)
    names = sorted({name for entry in entries for name in entry} - _NOT_DRAWN)
    losses = [name for name in names if "loss" in name]
    not_shares = {*losses, "learning_rate", "gradient_norm"}
    shares = [name for name in names if name not in not_shares]
    figure = Figure(figsize=(11, 4))
    # Fixed margins: measuring the labels for a layout takes as long as the drawing.
    margins = {"left": 0.06, "right": 0.985, "bottom": 0.125, "top": 0.925, "wspace": 0.13}
    loss_axes, share_axes = figure.subplots(1, 2, gridspec_kw=margins)
    for axes, plotted, title in ((loss_axes, losses, "loss"), (share_axes, shares, "accuracy")):
        for name in plotted:
            points = [(entry["step"], entry[name]) for entry in entries if name in entry]
            axes.plot(*zip(*points, strict=True), label=name.replace("_", " "))
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if plotted:
            axes.legend()
    figure.savefig(run_dir / CURVES, dpi=110)
    return run_dir / CURVES
