"""Describes errors in one line. An error may quote a bundle, which a stranger may have made."""

from pydantic import ValidationError

_MAX_CHARACTERS = 400


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
