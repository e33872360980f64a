"""Messages for bodies that are no JSON, or not that of a route: what is wrong, and where."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

import orjson
from pydantic import BaseModel

from cloze.model_store.error_lines import received
from cloze.service.errors import Location, MalformedRequest

_JSON_MESSAGES = {
    "dict_type": "Input should be an object",
    "list_type": "Input should be a valid array",
    "model_type": "Input should be an object",
    "tuple_type": "Input should be a valid array",
}
"""Errors in the terms of JSON, where pydantic's message has those of Python."""

_WRONG_TYPES = {*_JSON_MESSAGES, "string_type", "int_type"}
"""Errors of a value that does not have the type at all."""


def describe(problems: Sequence[Any], value: Any, at: Location, model: type[BaseModel]) -> str:
    """Return the message for validation errors; see `received` for the values in it.

    If a field accepts several types, the message lists up to four errors of the first field,
    without the types that the value does not have at all if another one fits better.
    """
    located = [
        (*_find(problem, value), problem)
        for problem in problems
        if problem["loc"][:1] == problems[0]["loc"][:1]
    ]
    deepest = max(len(path) for path, _, _ in located)
    lines: dict[str, None] = {}
    for path, wrong, problem in located:
        if len(path) == deepest or problem["type"] not in _WRONG_TYPES:
            parts = [str(part)[:80] for part in at.below(*path)]
            if problem["type"] == "extra_forbidden":
                message = _no_such_field(parts, at, model)
            else:
                message = _JSON_MESSAGES.get(problem["type"], problem["msg"])
                message += received(problem, wrong)
            lines[f"{'.'.join(parts) or 'the body'}: {message}"] = None
    return "; ".join(list(lines)[:4])


def _no_such_field(parts: Sequence[str], at: Location, model: type[BaseModel]) -> str:
    """Return the message for an unknown field, with the nearest name of a field."""
    *above, name = parts
    paths = [Location((*at, *path)) for path in _field_paths(model)]
    # Of fields with one name, the one beside the unknown one is the nearest.
    paths.sort(key=lambda path: list(path[:-1]) != above)
    by_name = {str(path[-1]): path for path in reversed(paths)}
    near = get_close_matches(name, by_name, 1)
    if not near:
        return "there is no such field"
    path = by_name[near[0]]
    shown = near[0] if list(path[:-1]) == above else str(path)
    return f"there is no such field (the nearest: {shown})"


def _field_paths(annotation: Any) -> Iterator[tuple[str, ...]]:
    """Yield the path of each field in the models of a type, such as a union or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield (field.alias or name,)
            yield from ((field.alias or name, *path) for path in _field_paths(field.annotation))
    for part in get_args(annotation):
        yield from _field_paths(part)


def _find(problem: Any, value: Any) -> tuple[list[str | int], Any]:
    """Return the path of a validation error in a value, and the value there.

    pydantic's paths also name the members of unions, which the value does not have.
    """
    path: list[str | int] = []
    for part in problem["loc"]:
        fields = range(len(value)) if isinstance(value, list) else value
        if isinstance(fields, dict | range) and part in fields:
            value = value[part]
            path.append(part)
    return [*path, problem["loc"][-1]] if problem["type"] == "missing" else path, value


def malformed(error: orjson.JSONDecodeError, data: bytes) -> MalformedRequest:
    """Return the error for a body that is not JSON."""
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        return not_utf8(f"byte {wrong.start} is 0x{data[wrong.start]:02x} (Latin-1?)")
    pairs = "; \\ud800 to \\udfff, surrogates, must come in pairs"
    hint = pairs if "surrogate" in error.msg else ""
    offset = len(error.doc[: error.pos].encode())
    problem = error.msg.partition(": line")[0]
    return MalformedRequest(f"the body is not JSON: {problem} at byte {offset}{hint}")


def not_utf8(what: str) -> MalformedRequest:
    """Return the error for a body that is not UTF-8."""
    return MalformedRequest(f"the body is not UTF-8: {what}; send JSON as UTF-8")
