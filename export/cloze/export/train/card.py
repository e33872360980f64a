"""The model card of a run: licence, source, data, recipe, hardware and results.

A person adds the assessment of the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from cloze.export.train.adapters import save_settings
from cloze.export.train.device import is_main
from cloze.export.train.folder import Folder, save
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import Recipe
from cloze.export.train.run_dir import CHECKPOINT
from cloze.export.train.run_options import RunOptions
from cloze.model_store.processor import processor_name

HELD_OUT = "held_out_"
"""Begins the names of the figures of held-out rows in a log."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a card says about a run.

    Attributes:
        source: what the run started from; None: random weights.
        files: what the run read.
        step: number of steps after which the run had the weights; None: all.
        figures: further rows of the card's table.
    """

    title: str
    source: Folder | None
    files: Sequence[Path]
    recipe: Recipe
    options: RunOptions
    step: int | None = None
    figures: Mapping[str, str] = field(default_factory=dict)


def front_matter(license_name: str | None) -> str:
    """Return the lines before the heading of a card, from which an export reads the licence."""
    return f"---\nlicense: {license_name}\n---\n\n" if license_name else ""


def write_run(model: Any, tokenizer: PreTrainedTokenizerBase, run: Run, **settings: Any) -> Path:
    """Write the result of a run with its card, and return its folder.

    Only the main process writes.

    Args:
        model: a model of transformers, sentence-transformers or peft.
        settings: further arguments of `save`.

    Raises:
        TrainError: the folder cannot be written.
    """
    folder = run.options.run_dir / CHECKPOINT
    if is_main():
        save(model, tokenizer, folder, describe(run), **settings)
        if isinstance(model, PeftModel):
            save_settings(model, folder)
    PartialState().wait_for_everyone()
    return folder


def describe(run: Run) -> str:
    """Return the model card of a run."""
    source, options, recipe = run.source, run.options, run.recipe
    last_entry = _last_entry(run)
    rows = {
        "from": source.location if source else "nothing: random weights",
        "data": ", ".join(file.name for file in run.files),
        "seed": str(recipe.seed),
        "steps": f"{last_entry['step']:,}",
        "tokens seen": f"{last_entry['tokens_seen']:,}",
        "hours": f"{last_entry['seconds'] / 3600:.2f}",
        "hardware": _hardware(options.device),
        "torch": torch.__version__,
    }
    for name, value in last_entry.items():
        if name.startswith(HELD_OUT) or name in ("loss", "accuracy"):
            rows[name.replace("_", " ")] = f"{value:.4f}"
    table = "\n".join(f"| {name} | {value} |" for name, value in (rows | dict(run.figures)).items())
    heading = front_matter(options.license or (source.license if source else None))
    return (
        f"{heading}# {run.title}\n\n| | |\n|---|---|\n{table}\n\n"
        f"Recipe:\n\n```json\n{recipe.model_dump_json(indent=2)}\n```\n"
    )


def held_out_line(run: Run, rows: int, main: str) -> str:
    """Return what a run reached on held-out rows, in words.

    Args:
        rows: number of held-out rows.
        main: name of the figure that says how good the model is.
    """
    figures = {
        name.removeprefix(HELD_OUT): value
        for name, value in _last_entry(run).items()
        if name.startswith(HELD_OUT)
    }
    if not rows or main not in figures:
        return "no row was held out, so nothing says how good the model is on other texts"
    shown = {main: figures.pop(main)} | figures
    listed = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in shown.items())
    nothing = "; the model has not learnt the task: train for longer" if not shown[main] else ""
    return f"on {rows:,} held-out rows, which the model has not seen: {listed}{nothing}"


def _last_entry(run: Run) -> dict[str, Any]:
    """Return the last entry of the log up to the step whose weights the run has."""
    entries = read_log(run.options.run_dir)
    return [each for each in entries if run.step is None or each["step"] <= run.step][-1]


def _hardware(device: torch.device) -> str:
    """Return the name of the GPU, or the processor's name and the number of cores in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} cores of {processor_name()}"
