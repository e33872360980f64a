"""Describes errors in one line. An error may quote a bundle, which a stranger may have made."""

import json
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_MAX_CHARACTERS = 400

_LONGEST_VALUE: Final = 80

_NAMED: Final = (
    "enum",
    "literal_error",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
)
"""Problems of pydantic whose message has the choices or the limit, and not the value."""


def printable(text: str) -> str:
    """Return a text without control characters, cut to a few lines of a terminal."""
    cut = text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none, printable."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a value: the field, the limit and the value."""
    problem = error.errors(include_url=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    field = ".".join(map(str, problem["loc"]))
    if not field:
        return message
    if problem["type"] == "value_error":
        return f"{field}: {message}"
    return f"{field}: {message[:1].lower()}{message[1:]}, got {problem['input']!r}"


def received(problem: ErrorDetails, value: Any) -> str:
    """Return ``, got VALUE``, cut, for a wrong choice or a number beyond a limit; else ``""``."""
    if problem["type"] not in _NAMED:
        return ""
    if isinstance(value, str):
        return f", got {ascii(value[:_LONGEST_VALUE])[:_LONGEST_VALUE]}"
    if isinstance(value, list | dict):
        return f", got {'an array' if isinstance(value, list) else 'an object'}"
    return f", got {json.dumps(value, default=str)[:_LONGEST_VALUE]}"
