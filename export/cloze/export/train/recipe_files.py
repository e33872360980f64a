"""Reads a recipe from a TOML file, and describes what is wrong with it in one line."""

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from cloze.export.errors import TrainError
from cloze.export.train.recipe import Recipe

RECIPES = Path(__file__).parent / "recipes"
"""Folder of the recipes of the package; a bare name on the command line is one of them."""

R = TypeVar("R", bound=Recipe)


def load_recipe(name: str, kind: type[R], *, seed: int | None = None) -> R:
    """Read a recipe.

    Args:
        seed: replaces the seed of the recipe; None: the seed of the recipe.

    Raises:
        TrainError: the file is missing or is not TOML, or a field is unknown or invalid.
    """
    file = Path(name)
    if not file.suffix and not file.exists():
        file = RECIPES / f"{name}.toml"
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        recipe = kind.model_validate(data)
    except FileNotFoundError:
        names = ", ".join(sorted(entry.stem for entry in RECIPES.glob("*.toml")))
        raise TrainError(f"there is no recipe {name}; a file, or one of: {names}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise TrainError(f"{file} is not TOML: {error}") from error
    except ValidationError as error:
        raise TrainError(f"{file.name}: {_describe_error(error)}") from error
    return recipe if seed is None else recipe.model_copy(update={"seed": seed})


def _describe_error(error: ValidationError) -> str:
    """Describe the first error of a validation, or an unknown key if there is one.

    A misspelt key causes two errors, and the unknown key explains the missing key.
    """
    details = error.errors()
    detail = next((each for each in details if each["type"] == "extra_forbidden"), details[0])
    location = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"unknown key {location}"
    # The messages of our own validators are complete.
    message = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], str | int | float | list):
        return f"{location}: {message}, got {repr(detail['input'])[:80]}"
    # The input is a table: a key is missing, or the keys do not fit together.
    return f"{location}: {message}" if location else message
