"""What a run's folder belongs to: one recipe on one set of inputs. Another would give a model that nothing describes."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export.train.errors import TrainError
from export.train.recipe import Recipe

IDENTITY = "run.json"
STATE = "state.pt"
VOCABULARY = "vocabulary"


def claim(folder: Path, recipe: Recipe, inputs: Mapping[str, str | None]) -> None:
    """Make the folder this run's, or see that it is already. A try that left no checkpoint has no claim.

    Args:
        folder: of the run; made if it is not there.
        recipe: of the run.
        inputs: what it learns from and begins with, by name; a hash each.

    Raises:
        TrainError: it holds a run of another recipe, or on other inputs, or what it says of its run is damaged.
    """
    file = folder / IDENTITY
    said: dict[str, dict[str, Any]] = {
        "recipe": recipe.model_dump(mode="json"),
        "inputs": dict(inputs),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise TrainError(f"{folder} is not a folder") from None
    if (folder / STATE).exists():
        _check(file, said)
    elif not file.is_file() or file.read_bytes() != _dump(said).encode():
        shutil.rmtree(
            folder / VOCABULARY, ignore_errors=True
        )  # an earlier try's may be of another text
        new = folder / f"{IDENTITY}.new"
        new.write_text(_dump(said))
        new.replace(file)


def _check(file: Path, said: Mapping[str, Mapping[str, Any]]) -> None:
    try:
        there = json.loads(file.read_text())
        changed = [
            name for name, value in said["inputs"].items() if there["inputs"].get(name) != value
        ]
        same_recipe = there["recipe"] == said["recipe"]
    except FileNotFoundError:
        raise TrainError(f"{file} is gone; give another folder, or remove this one") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise TrainError(
            f"{file} is damaged ({error}); give another folder, or remove it"
        ) from error
    if not same_recipe:
        raise TrainError(
            f"{file.parent} holds a run of another recipe; give another folder, or remove it"
        )
    if changed:
        raise TrainError(
            f"{file.parent} holds a run with another {' and another '.join(changed)}; give another folder, or remove it"
        )


def _dump(said: Mapping[str, object]) -> str:
    return json.dumps(said, indent=2) + "\n"
