"""Parses JSON bodies within limits.

A parser in C holds Python's global interpreter lock until it returns, so all other threads, the
event loop included, wait meanwhile. So a scan in front of the parser counts what a large body would
become, and refuses too many values.
"""

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, get_args

import orjson
from pydantic import BaseModel, ValidationError

from cloze.model_store.error_lines import received
from cloze.service.core import InvalidRequest, Location, MalformedRequest, RequestTooLarge
from cloze.service.threads import check_awaited, run_on_thread

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

SHORT_BYTES = 65_536
"""Most bytes of a body that is parsed on the event loop; it stays below all limits of values."""

_NOT_JSON = "the body is not JSON"
_NOT_UTF8 = "the body is not UTF-8"
_AS_UTF8 = "send JSON as UTF-8"

_LONGEST_NAME = 80
"""Most characters of a field's name in errors."""

_BODY = Location()

_JSON_MESSAGES = {
    "dict_type": "Input should be an object",
    "list_type": "Input should be a valid array",
    "model_type": "Input should be an object",
    "tuple_type": "Input should be a valid array",
}
"""Errors in the terms of JSON, where pydantic's message has those of Python."""


_WRONG_TYPES = {*_JSON_MESSAGES, "string_type", "int_type"}
"""Errors of a value that does not have the type at all."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits of a body.

    Attributes:
        max_bytes: most bytes, before and after decompression.
        max_parts: most texts, lists and objects in all, names of fields included.
        max_values: most JSON values in all, most of which are numbers then.
    """

    max_bytes: int
    max_parts: int
    max_values: int

    @classmethod
    def of_requests(cls, max_bytes: int, max_texts: int, max_tokens: int) -> "BodyLimits":
        """Return limits that admit every request within the limits of texts and tokens.

        A text may be one of several in an object, and each token may be a number.
        """
        max_parts = max(16 * max_texts, SHORT_BYTES // 2)
        return cls(max_bytes, max_parts, max_tokens + max_parts)


async def run_anywhere(size: int, function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function; it runs on a thread if the body has many bytes."""
    if size <= SHORT_BYTES:
        return function(*arguments)
    return await run_on_thread(function, *arguments)


def parse(model: type[B], data: bytes, limits: BodyLimits) -> B:
    """Parse a JSON body.

    Raises:
        MalformedRequest: the body is not JSON.
        RequestTooLarge: the body has too many values.
        InvalidRequest: the JSON does not have the shape of the model.
    """
    return validate(model, load(data, limits))


def validate(model: type[B], value: Any, at: Location = _BODY) -> B:
    """Return a JSON value, which is at a place in the body, as a model.

    Raises:
        InvalidRequest: the value does not have the shape of the model.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise InvalidRequest(_describe(problems, value, at, model)) from None


def _describe(problems: Sequence[Any], value: Any, at: Location, model: type[BaseModel]) -> str:
    """Return the message for validation errors; see `received` for the values in it.

    If a field accepts several types, the message lists up to four errors of the first field,
    without the types that the value does not have at all if another one fits better.
    """
    placed = [
        (*_find(problem, value), problem)
        for problem in problems
        if problem["loc"][:1] == problems[0]["loc"][:1]
    ]
    deepest = max(len(place) for place, _, _ in placed)
    lines: dict[str, None] = {}
    for place, wrong, problem in placed:
        if len(place) == deepest or problem["type"] not in _WRONG_TYPES:
            parts = [str(part)[:_LONGEST_NAME] for part in at.below(*place)]
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


@cache
def _field_paths(model: type[BaseModel]) -> tuple[tuple[str, ...], ...]:
    """Return the place of each field in a model, and in the models of its fields."""
    paths: list[tuple[str, ...]] = []
    for name, field in model.model_fields.items():
        paths.append((field.alias or name,))
        paths += [(field.alias or name, *path) for path in _paths_in(field.annotation)]
    return tuple(paths)


def _paths_in(annotation: Any) -> Iterator[tuple[str, ...]]:
    """Yield the places of fields in the models of a type, such as a union or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _field_paths(annotation)
    for part in get_args(annotation):
        yield from _paths_in(part)


def _find(problem: Any, value: Any) -> tuple[list[str | int], Any]:
    """Return the place of a validation error in a value, and the value there.

    pydantic's places also name the members of unions, which the value does not have.
    """
    place: list[str | int] = []
    for part in problem["loc"]:
        fields = range(len(value)) if isinstance(value, list) else value
        if isinstance(fields, dict | range) and part in fields:
            value = value[part]
            place.append(part)
    return [*place, problem["loc"][-1]] if problem["type"] == "missing" else place, value


def load(data: bytes, limits: BodyLimits, chunk_bytes: int = SHORT_BYTES) -> Any:
    """Return the value of a JSON body. A byte order mark of UTF-8 before it is ignored.

    Args:
        data: the body.
        limits: the limits of bodies above ``chunk_bytes``.
        chunk_bytes: how much is scanned at once; at least 2.

    Raises:
        MalformedRequest: the body is not JSON.
        RequestTooLarge: the body has too many values.
        Abandoned: nobody waits for the value any more.
    """
    if data.startswith(BOM_UTF8):
        data = b"   " + data[3:]  # spaces, so that places in errors are those of the body
    if b"\0" in data[:4] or data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise MalformedRequest(f"{_NOT_UTF8}: it begins as UTF-16 or UTF-32, at byte 0; {_AS_UTF8}")
    if not data.strip():
        raise MalformedRequest("the body is empty; send a JSON object")
    if len(data) > chunk_bytes:
        _check_counts(data, limits, chunk_bytes)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _malformed(error, data) from None


def _malformed(error: orjson.JSONDecodeError, data: bytes) -> MalformedRequest:
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        byte, place = data[wrong.start], wrong.start
        return MalformedRequest(f"{_NOT_UTF8}: byte {place} is 0x{byte:02x} (Latin-1?); {_AS_UTF8}")
    surrogate = "; \\ud800 to \\udfff, surrogates, must come in pairs"
    hint = surrogate if "surrogate" in error.msg else ""
    place = len(error.doc[: error.pos].encode())
    problem = error.msg.partition(": line")[0]
    return MalformedRequest(f"{_NOT_JSON}: {problem} at byte {place}{hint}")


# ---- large bodies --------------------------------------------------------------------------------


def _check_counts(data: bytes, limits: BodyLimits, chunk_bytes: int) -> None:
    """Raise `RequestTooLarge` if a body has too many values; it need not be JSON."""
    scanned = quotes = brackets = commas = 0
    while scanned < len(data):
        check_awaited()
        chunk = _without_strings(data[scanned : scanned + chunk_bytes], in_string=quotes % 2 == 1)
        scanned += len(chunk)
        quotes += chunk.count(b'"')
        brackets += chunk.count(b"[") + chunk.count(b"{")
        commas += chunk.count(b",")
        if brackets + quotes // 2 > limits.max_parts:
            raise RequestTooLarge(
                f"the body has over {limits.max_parts} texts, lists and objects, the limit"
            )
        if commas + brackets > limits.max_values:
            raise RequestTooLarge(f"the body has over {limits.max_values} values, the limit")


def _without_strings(chunk: bytes, *, in_string: bool) -> bytes:
    """Return JSON, which may begin in a string, with ``_`` for each byte inside a string.

    The result lacks the last byte if that is a backslash, whose character is in the next chunk.
    """
    chunk = chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    if chunk.endswith(b"\\") and len(chunk) > 1:
        chunk = chunk[:-1]
    parts = chunk.split(b'"')
    for index in range(not in_string, len(parts), 2):
        parts[index] = b"_" * len(parts[index])
    return b'"'.join(parts)
