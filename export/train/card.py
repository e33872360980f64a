"""Writes the model card of a run: its licence, source, data, recipe, hardware and results.

A person adds the assessment of the model.
"""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cloze.export.checkpoint import Checkpoint
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import Recipe
from cloze.export.train.run_options import RunOptions

CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Run:
    """What a card says about a run."""

    title: str
    source: str | None
    origins: Sequence[Checkpoint]
    files: Sequence[Path]
    recipe: Recipe
    options: RunOptions


def common_license(checkpoints: Iterable[Checkpoint]) -> str | None:
    """Return the licence that the cards of all checkpoints name; None if they do not agree."""
    licenses = {checkpoint.license for checkpoint in checkpoints}
    return licenses.pop() if len(licenses) == 1 else None


def front_matter(license_name: str | None) -> str:
    """Return the lines before the heading of a card, from which an export reads the licence."""
    return f"---\nlicense: {license_name}\n---\n\n" if license_name else ""


def write_card(checkpoint: Path, run: Run) -> None:
    """Write ``README.md`` into a checkpoint."""
    last_entry = read_log(checkpoint.parent)[-1]
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
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    recipe_json = run.recipe.model_dump_json(indent=2)
    license_name = run.options.license or common_license(run.origins)
    heading = f"{front_matter(license_name)}# {run.title}"
    (checkpoint / CARD).write_text(
        f"{heading}\n\n| | |\n|---|---|\n{table}\n\nRecipe:\n\n```json\n{recipe_json}\n```\n",
        encoding="utf-8",
    )


def _hardware(device: torch.device) -> str:
    """Return the name of the GPU, or the processor's name and the number of cores in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{torch.get_num_threads()} cores of {model}"
