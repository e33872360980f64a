"""``cloze`` whose training runs take two steps: ``python -m tests.support.short_cloze LOG ARGUMENTS``.

Each call appends its arguments to the file LOG. Recipes keep all fields but the length of the run.
The gates of an export let everything pass, since after two steps answers are close to random.
"""

import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from cloze.cli import main
from cloze.export.heads import EXPORT_HEADS
from cloze.export.train.recipe import RECIPES

SHORTER = {"steps": 2, "sequences": 4, "epochs": 1}


def shortened(recipe: str) -> str:
    """Return the recipe with two steps per phase, and small batches."""
    for field, value in SHORTER.items():
        recipe = re.sub(rf"^{field} = \d+", f"{field} = {value}", recipe, flags=re.MULTILINE)
    return recipe


if __name__ == "__main__":
    log, *arguments = sys.argv[1:]
    with Path(log).open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    for name, head in EXPORT_HEADS.items():
        EXPORT_HEADS[name] = replace(head, limits=dict.fromkeys(head.limits, -1.0))
    with tempfile.TemporaryDirectory() as folder:
        if "--recipe" in arguments or "finetune-tasks" in arguments:
            position = arguments.index("--recipe" if "--recipe" in arguments else "finetune-tasks")
            recipe = Path(arguments[position + 1])
            recipe = recipe if recipe.suffix else RECIPES / f"{recipe}.toml"
            short = Path(folder) / recipe.name
            short.write_text(shortened(recipe.read_text()))
            arguments[position + 1] = str(short)
        main(arguments)
