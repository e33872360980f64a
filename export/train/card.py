"""Writes the model card of a run: its source, data, recipe, hardware and results.

A person adds the assessment of the model.
"""

import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from cloze.export.train.progress import read_log
from cloze.export.train.recipe import Recipe

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
    """Write ``README.md`` into a checkpoint.

    Args:
        checkpoint: directory of the weights, inside the run's directory.
        title: heading of the card.
        source: checkpoint that the run started from; None: random weights.
        files: training data.
        recipe: recipe of the run.
        device: device of the run.
    """
    last_entry = read_log(checkpoint.parent)[-1]
    figures = {
        name: value
        for name, value in last_entry.items()
        if name.startswith("held_out_") or name in ("loss", "accuracy")
    }
    rows = {
        "from": source or "nothing: random weights",
        "data": ", ".join(file.name for file in files),
        "seed": str(recipe.seed),
        "steps": f"{last_entry['step']:,}",
        "tokens seen": f"{last_entry['tokens_seen']:,}",
        "hours": f"{last_entry['seconds'] / 3600:.2f}",
        "hardware": _hardware(device),
        "torch": torch.__version__,
    } | {name.replace("_", " "): f"{value:.4f}" for name, value in figures.items()}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    recipe_json = recipe.model_dump_json(indent=2)
    (checkpoint / CARD).write_text(
        f"# {title}\n\n| | |\n|---|---|\n{table}\n\nRecipe:\n\n```json\n{recipe_json}\n```\n",
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
