"""The visible progress of a run: a progress bar, a JSON Lines log, and a PNG of its curves."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

from cloze.model_store.plain_files import replacing

LOG = "log.jsonl"
CURVES = "curves.png"

_BAR = "{percentage:3.0f}% {bar} {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}"
"""Without the steps per second, for which the tokens per second stand: the bar needs the room."""

_SHOWN = ("loss", "accuracy")
_NOT_DRAWN = {
    "step",
    "seconds",
    "tokens_seen",
    "tokens_per_second",
    "learning_rate",
    "gradient_norm",
}


class Progress:
    """A progress bar on standard error, and a log with one entry per interval.

    Args:
        step: number of finished steps; later entries of an earlier attempt are removed from the
            log.
    """

    def __init__(self, run_dir: Path, step: int, steps: int) -> None:
        self._file = run_dir / LOG
        kept = [entry for entry in read_log(run_dir) if entry["step"] <= step]
        with replacing(self._file) as new_file:
            new_file.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        self._started_at = time.monotonic() - (kept[-1]["seconds"] if kept else 0.0)
        self._tokens_seen = kept[-1]["tokens_seen"] if kept else 0
        self._last_entry = (time.monotonic(), self._tokens_seen)
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
        self._last_entry = (now, self._tokens_seen)
        entry: dict[str, float] = {
            "step": step,
            "seconds": round(now - self._started_at, 1),
            "tokens_seen": self._tokens_seen,
            "tokens_per_second": round(rate),
        }
        entry |= {name: round(value, 6) for name, value in figures.items()}
        with self._file.open("a") as stream:
            stream.write(json.dumps(entry) + "\n")
        shown = {name: f"{figures[name]:.3f}" for name in _SHOWN if name in figures}
        self._bar.set_postfix(shown | {"tokens/s": f"{rate:,.0f}"}, refresh=False)

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
    """Draw every figure of the log over the steps: losses in one plot, shares in another."""
    entries = read_log(run_dir)
    names = {name for entry in entries for name in entry} - _NOT_DRAWN
    losses = {name for name in names if "loss" in name}
    figure = Figure(figsize=(11, 4))
    # Fixed margins: measuring the labels for a layout takes as long as the drawing.
    margins = {"left": 0.06, "right": 0.985, "bottom": 0.125, "top": 0.925, "wspace": 0.13}
    plots = zip(figure.subplots(1, 2, gridspec_kw=margins), ("loss", "accuracy"), strict=True)
    for axes, title in plots:
        drawn = sorted(losses if title == "loss" else names - losses)
        for name in drawn:
            points = [(entry["step"], entry[name]) for entry in entries if name in entry]
            axes.plot(*zip(*points, strict=True), label=name.replace("_", " "))
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if drawn:
            axes.legend(loc="upper left")
    figure.savefig(run_dir / CURVES, dpi=110)
    return run_dir / CURVES
