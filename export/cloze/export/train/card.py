"""The model card of a run: licence, source, data, recipe, hardware and results.

A person adds the assessment of the model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from cloze.export.train.adapters import save_settings
from cloze.export.train.device import is_main
from cloze.export.train.folder import save
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import Recipe
from cloze.export.train.run_dir import CHECKPOINT
from cloze.export.train.run_options import RunOptions
from cloze.model_store.processor import processor_name


class Licensed(Protocol):
    """What a run starts from."""

    @property
    def license(self) -> str | None:
        """Return the licence; None: the model card names none."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a card says about a run.

    Attributes:
        step: number of steps after which the run had the weights; None: all.
        figures: further rows of the card's table.
    """

    title: str
    source: str | None
    origins: Sequence[Any]
    files: Sequence[Path]
    recipe: Recipe
    options: RunOptions
    step: int | None = None
    figures: Mapping[str, str] = field(default_factory=dict)


def common_license(checkpoints: Iterable[Licensed]) -> str | None:
    """Return the licence that the cards of all checkpoints name; None if they do not agree."""
    licenses = {checkpoint.license for checkpoint in checkpoints}
    return licenses.pop() if len(licenses) == 1 else None


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
    entries = read_log(run.options.run_dir)
    last_entry = [each for each in entries if run.step is None or each["step"] <= run.step][-1]
    figures = {
        name: value
        for name, value in last_entry.items()
        if name.startswith("held_out_") or name in ("loss", "accuracy")
    }
    rows = {
        "from": run.source or "nothing: random weights",
        "data": ", ".join(file.name for file in run.files),
        "seed": str(run.recipe.seed),
        "steps": f"{last_entry['step']:,}",
        "tokens seen": f"{last_entry['tokens_seen']:,}",
        "hours": f"{last_entry['seconds'] / 3600:.2f}",
        "hardware": _hardware(run.options.device),
        "torch": torch.__version__,
    } | {name.replace("_", " "): f"{value:.4f}" for name, value in figures.items()}
    rows |= run.figures
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    recipe_json = run.recipe.model_dump_json(indent=2)
    license_name = run.options.license or common_license(run.origins)
    heading = f"{front_matter(license_name)}# {run.title}"
    return f"{heading}\n\n| | |\n|---|---|\n{table}\n\nRecipe:\n\n```json\n{recipe_json}\n```\n"


def _hardware(device: torch.device) -> str:
    """Return the name of the GPU, or the processor's name and the number of cores in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} cores of {processor_name()}"
