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

if __name__ == "__main__":
    log, *arguments = sys.argv[1:]
    with Path(log).open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    for name, head in EXPORT_HEADS.items():
        EXPORT_HEADS[name] = replace(head, limits=dict.fromkeys(head.limits, -1.0))
    with tempfile.TemporaryDirectory() as folder:
        before = "--recipe" if "--recipe" in arguments else "finetune-tasks"
        if before in arguments:
            position = arguments.index(before) + 1
            recipe = Path(arguments[position])
            text = (recipe if recipe.suffix else RECIPES / f"{recipe}.toml").read_text()
            for field, value in SHORTER.items():
                text = re.sub(rf"^{field} = \d+", f"{field} = {value}", text, flags=re.MULTILINE)
            short = Path(folder) / f"{recipe.stem}.toml"
            short.write_text(text)
            arguments[position] = str(short)
        main(arguments)
