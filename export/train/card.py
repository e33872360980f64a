"""Writes the model card of a run: what it was made from, how, on what, and what it reached. A person adds the judgement."""

import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from export.train.progress import read_log
from export.train.recipe import Recipe

CARD = "README.md"


def write_card(
    checkpoint: Path,
    *,
    title: str,
    source: str | None,
    files: Iterable[Path],
    recipe: Recipe,
    device: torch.device,
) -> None:
    """Write ``README.md`` beside the weights.

    Args:
        checkpoint: the folder of the weights; the run's is its parent.
        title: what was done.
        source: the checkpoint it began from.
        files: what was learnt from.
        recipe: the run.
        device: where it ended.
    """
    last = read_log(checkpoint.parent)[-1]
    figures = {
        name: value
        for name, value in last.items()
        if name.startswith("held_out_") or name in ("loss", "accuracy")
    }
    rows = {
        "from": source or "nothing: random weights",
        "data": ", ".join(file.name for file in files),
        "seed": str(recipe.seed),
        "steps": f"{last['step']:,}",
        "tokens seen": f"{last['tokens_seen']:,}",
        "hours": f"{last['seconds'] / 3600:.2f}",
        "hardware": hardware(device),
        "torch": torch.__version__,
    } | {name.replace("_", " "): f"{value:.4f}" for name, value in figures.items()}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    said = recipe.model_dump_json(indent=2)
    (checkpoint / CARD).write_text(
        f"# {title}\n\n| | |\n|---|---|\n{table}\n\nRecipe:\n\n```json\n{said}\n```\n",
        encoding="utf-8",
    )


def hardware(device: torch.device) -> str:
    """The processor's name and how many of its cores were used, or the GPU's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if names.is_file():
        found = [
            line.split(":", 1)[1].strip()
            for line in names.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = found[0] if found else model
    return f"{torch.get_num_threads()} cores of {model}"
