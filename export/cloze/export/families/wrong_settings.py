"""Finds the setting of a ``config.json`` that is wrong: sizes have other names than settings."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from cloze.export.families.family import Family

WRONG_TYPE: Final = (TypeError, AttributeError, ArithmeticError)
"""Errors of a computation with a setting that has another type than a family expects, or is 0."""

_PROBES: Final = (2, 512, 0.5)
"""Values of which a setting that is a number takes at least one."""

_NESTED: Final = {
    "rotary_base": "rope_theta",
    "local_rotary_base": "rope_theta of the local layers",
    "rotary_factor": "factor of the rotary positions",
}
"""Sizes that settings may have within another setting -> their names there."""


def describe_invalid(error: ValidationError, family: Family, settings: Mapping[str, Any]) -> str:
    """Return the first problem of sizes, with the setting that gave it and its value."""
    first = error.errors()[0]
    problem = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return problem
    size, got = str(first["loc"][0]), f"{first['input']!r:.80}"
    name = wrong_setting(family, settings, size)
    if name is None:
        return f"{_NESTED.get(size, size)}: {problem}, got {got}"
    if (given := f"{settings[name]!r:.80}") != got:
        return f"{name}: {problem}, got {got} of {given}"
    return f"{name}: {problem}, got {got}"


def wrong_setting(
    family: Family, settings: Mapping[str, Any], size: str | None = None
) -> str | None:
    """Return the setting without which, or with another value, an error does not occur.

    Args:
        size: the size that is invalid; None: the error is one of `WRONG_TYPE`.

    Returns:
        The name; None: there is no such setting. A setting with which all sizes are valid goes
        before one with which others are invalid.
    """
    second = None
    for name in settings:
        others = {other: value for other, value in settings.items() if other != name}
        for changed in (others, *({**others, name: value} for value in _PROBES)):
            try:
                family.read_config(changed)
            except ValidationError as error:
                invalid = {str(one["loc"][0]) for one in error.errors() if one["loc"]}
                if size not in invalid:
                    second = second or name
                continue
            except (*WRONG_TYPE, KeyError, ValueError):
                continue
            return name
    return second
