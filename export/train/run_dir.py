"""The directory of a run belongs to one recipe on one set of inputs.

A second recipe in the same directory would give a model that no recipe describes.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloze.export.errors import TrainError
from cloze.export.train.recipe import Recipe

IDENTITY = "run.json"
STATE = "state.pt"
VOCABULARY = "vocabulary"
CORPUS = "corpus"
CHECKPOINT = "checkpoint"


def acquire_run_dir(run_dir: Path, recipe: Recipe, inputs: Mapping[str, str | None]) -> None:
    """Assign the directory to this run, or check that the directory belongs to this run.

    A directory without a checkpoint may be assigned to another run.

    Args:
        run_dir: directory of the run, created if missing.
        inputs: hash of each input (text, source checkpoint, ...) by name; None: input not given.

    Raises:
        TrainError: the directory belongs to a run of another recipe or on other inputs, or its
            ``run.json`` is damaged.
    """
    identity_file = run_dir / IDENTITY
    identity: dict[str, dict[str, Any]] = {
        "recipe": recipe.model_dump(mode="json"),
        "inputs": dict(inputs),
    }
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise TrainError(f"{run_dir} is not a folder") from None
    if (run_dir / STATE).exists():
        _check_identity(identity_file, identity)
        return
    content = json.dumps(identity, indent=2) + "\n"
    if not identity_file.is_file() or identity_file.read_bytes() != content.encode():
        # The vocabulary of an earlier attempt may come from another text.
        shutil.rmtree(run_dir / VOCABULARY, ignore_errors=True)
        new_file = run_dir / f"{IDENTITY}.new"
        new_file.write_text(content)
        new_file.replace(identity_file)


def _check_identity(identity_file: Path, identity: Mapping[str, Mapping[str, Any]]) -> None:
    try:
        recorded = json.loads(identity_file.read_text())
        changed_inputs = [
            name
            for name, value in identity["inputs"].items()
            if recorded["inputs"].get(name) != value
        ]
        same_recipe = recorded["recipe"] == identity["recipe"]
    except FileNotFoundError:
        raise TrainError(
            f"{identity_file} is gone; give another folder, or remove this one"
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise TrainError(
            f"{identity_file} is damaged ({error}); give another folder, or remove it"
        ) from error
    run_dir = identity_file.parent
    if not same_recipe:
        raise TrainError(
            f"{run_dir} holds a run of another recipe; give another folder, or remove it"
        )
    if changed_inputs:
        raise TrainError(
            f"{run_dir} holds a run with another {' and another '.join(changed_inputs)}; "
            "give another folder, or remove it"
        )
