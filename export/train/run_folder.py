"""What a run's folder belongs to: one recipe on one set of inputs. Another would give a model that nothing describes."""

import json
from collections.abc import Mapping
from pathlib import Path

from export.train.errors import TrainError
from export.train.recipe import Recipe

IDENTITY = "run.json"


def claim(folder: Path, recipe: Recipe, inputs: Mapping[str, str | None]) -> None:
    """Make the folder this run's, or see that it is already.

    Args:
        folder: of the run; made if it is not there.
        recipe: of the run.
        inputs: what it learns from and begins with, by name; a hash each.

    Raises:
        TrainError: it holds a run of another recipe, or on other inputs, or what it says of its run is damaged.
    """
    file = folder / IDENTITY
    said = {"recipe": recipe.model_dump(mode="json"), "inputs": dict(inputs)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = json.loads(file.read_text())
        if not isinstance(there, dict) or there.get("recipe") != said["recipe"]:
            raise TrainError(f"{folder} holds a run of another recipe; give another folder, or remove it")
        if changed := [name for name, value in inputs.items() if there["inputs"].get(name) != value]:
            raise TrainError(
                f"{folder} holds a run with another {' and another '.join(changed)}; give another folder, or remove it"
            )
    except FileNotFoundError:
        new = folder / f"{IDENTITY}.new"
        new.write_text(json.dumps(said, indent=2) + "\n")
        new.replace(file)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise TrainError(f"{file} is damaged ({error}); give another folder, or remove it") from error
    except (FileExistsError, NotADirectoryError):
        raise TrainError(f"{folder} is not a folder") from None
