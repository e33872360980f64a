"""Parses JSON bodies within limits, and in pieces, so that no body holds up the other threads.

A parser in C holds Python's global interpreter lock until it returns, so all other threads, the
event loop included, wait meanwhile. A large body is therefore divided at commas, and the parser
gets one piece after another. A scan in front of the parser counts what the body would become.
"""

import re
import secrets
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, get_args

import orjson
from pydantic import BaseModel, ValidationError

from cloze.model_store.error_lines import received
from cloze.service.abandonment import check_awaited, run_on_thread
from cloze.service.core import InvalidRequest, Location, MalformedRequest, RequestTooLarge

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

PIECE_BYTES = 65_536
"""Bytes of a piece. Shorter bodies are parsed at once, and stay below all limits."""

_MAX_DEPTH = 1024
"""Most lists and objects inside each other: the limit of orjson."""

_MAX_NUMBER = 1024
"""Most characters of a number in a piece that has no comma; the parser takes a number at once."""

_LONG_NUMBER = re.compile(rb"[-+.0-9eE]{%d}" % (_MAX_NUMBER + 1))
_BRACKET = re.compile(rb"[][{}]")
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
        max_parts = max(16 * max_texts, PIECE_BYTES // 2)
        return cls(max_bytes, max_parts, max_tokens + max_parts)


async def run_anywhere(size: int, function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function; it runs on a thread if the body has many bytes."""
    if size <= PIECE_BYTES:
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


def load(data: bytes, limits: BodyLimits, piece_bytes: int = PIECE_BYTES) -> Any:
    """Return the value of a JSON body. A byte order mark of UTF-8 before it is ignored.

    Args:
        data: the body.
        limits: the limits of bodies above ``piece_bytes``.
        piece_bytes: at least 2.

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
    if len(data) > piece_bytes:
        return _load_pieces(data, limits, piece_bytes)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _malformed(error, data, 0) from None


def _malformed(
    error: orjson.JSONDecodeError, text: bytes, start: int, before: bytes = b""
) -> MalformedRequest:
    """Return the error of a part of the body, which begins at the byte ``start``.

    The parser got ``before`` in front of the part.
    """
    try:
        text.decode()
    except UnicodeDecodeError as wrong:
        byte, place = text[wrong.start], start + wrong.start
        return MalformedRequest(f"{_NOT_UTF8}: byte {place} is 0x{byte:02x} (Latin-1?); {_AS_UTF8}")
    surrogate = "; \\ud800 to \\udfff, surrogates, must come in pairs"
    hint = surrogate if "surrogate" in error.msg else ""
    place = start - len(before) + len(error.doc[: error.pos].encode())
    problem = error.msg.partition(": line")[0]
    return MalformedRequest(f"{_NOT_JSON}: {problem} at byte {place}{hint}")


# ---- large bodies --------------------------------------------------------------------------------


def _load_pieces(data: bytes, limits: BodyLimits, piece_bytes: int) -> Any:
    document = _Document()
    start = 0
    for masked in _masked_pieces(data, limits, piece_bytes):
        check_awaited()
        document.read(data[start : start + len(masked)], masked, start)
        start += len(masked)
    return document.value()


def _masked_pieces(data: bytes, limits: BodyLimits, size: int) -> Iterator[bytes]:
    """Yield the pieces of JSON with ``_`` for each byte inside a string; each ends before a comma.

    Raises:
        RequestTooLarge: the body has too many values.
    """
    piece = bytearray()
    scanned = quotes = brackets = closing = commas = 0
    while scanned < len(data):
        masked = _mask(data[scanned : scanned + size], in_string=quotes % 2 == 1)
        quotes += masked.count(b'"')
        brackets += masked.count(b"[") + masked.count(b"{")
        closing += masked.count(b"]") + masked.count(b"}")
        commas += masked.count(b",")
        if closing > brackets + _MAX_DEPTH:  # fewer are an error of the document, with its place
            raise MalformedRequest(f"{_NOT_JSON}: more brackets end than begin")
        if brackets + quotes // 2 > limits.max_parts:
            raise RequestTooLarge(
                f"the body has over {limits.max_parts} texts, lists and objects, the limit"
            )
        if commas + brackets > limits.max_values:
            raise RequestTooLarge(f"the body has over {limits.max_values} values, the limit")
        scanned += len(masked)
        cut = len(piece) + masked.rfind(b",")
        has_comma = cut >= len(piece)
        if not has_comma and _LONG_NUMBER.search(masked):
            raise MalformedRequest(f"{_NOT_JSON}: a number has over {_MAX_NUMBER} characters")
        piece += masked
        if has_comma:
            yield bytes(piece[:cut])
            del piece[:cut]
    yield bytes(piece)


def _mask(chunk: bytes, *, in_string: bool) -> bytes:
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


class _Document:
    """A JSON document that is read in pieces. Errors are `MalformedRequest`.

    A list or an object that is not within one piece is *open*: its elements are parsed in several
    parts. In each part, a placeholder stands for an open child, and for what the parts before had.
    """

    def __init__(self) -> None:
        self._root: list[Any] = []
        self._open: list[Any] = [self._root]
        self._is_empty = True  # the innermost open list or object
        self._name = secrets.token_hex(8)  # no client can guess it

    def value(self) -> Any:
        """Return the value of the document, all of which has been read."""
        if len(self._open) > 1:
            raise MalformedRequest(f"{_NOT_JSON}: unexpected end of data")
        if len(self._root) != 1:
            raise MalformedRequest(f"{_NOT_JSON}: it has several values")
        return self._root[0]

    def read(self, piece: bytes, masked: bytes, start: int) -> None:
        """Read the next piece; it begins at the byte ``start``, and ``masked`` has no strings."""
        first = 0
        for place in _unmatched_brackets(masked):
            text, is_list = piece[first:place], masked[place] in b"[]"
            if masked[place] in b"[{":
                self._begin(text, start + first, is_list=is_list)
            else:
                self._end(text, start + first, is_list=is_list)
            first = place + 1
        if self._is_empty and not piece[first:].strip():
            raise MalformedRequest(f"{_NOT_JSON}: expected a value at byte {start + len(piece)}")
        self._add(piece[first:], start + first)

    def _begin(self, text: bytes, start: int, *, is_list: bool) -> None:
        """Add the elements before an open list or object, and then that."""
        if len(self._open) > _MAX_DEPTH:
            raise MalformedRequest(f"{_NOT_JSON}: depth limit exceeded at byte {start}")
        child: Any = [] if is_list else {}
        self._add(text, start, child)
        self._open.append(child)
        self._is_empty = True

    def _end(self, text: bytes, start: int, *, is_list: bool) -> None:
        """Add the last elements of the innermost open list or object."""
        if len(self._open) == 1 or isinstance(self._open[-1], list) is not is_list:
            raise MalformedRequest(f"{_NOT_JSON}: unexpected bracket at byte {start + len(text)}")
        if not self._is_empty or text.strip():
            self._add(text, start)
        self._open.pop()
        self._is_empty = False

    def _add(self, text: bytes, start: int, child: Any = None) -> None:
        """Add elements, and a child that follows them, to the innermost open list or object."""
        parent, name = self._open[-1], self._name
        if isinstance(parent, list):
            before = b"[" if self._is_empty else b"[null"
            after = b"]" if child is None else b"null]"
            elements = self._parsed(before, text, after, start)
            parent += elements if self._is_empty else elements[1:]
            if child is not None:
                parent[-1] = child
        else:
            quoted = b'"%s"' % name.encode()
            before = b"{" if self._is_empty else b"{%s:null" % quoted
            after = b"}" if child is None else quoted + b"}"
            members = self._parsed(before, text, after, start)
            members.pop(name, None)
            if child is not None:
                members[next(key for key in members if members[key] == name)] = child
            parent |= members
        self._is_empty = False

    @staticmethod
    def _parsed(before: bytes, text: bytes, after: bytes, start: int) -> Any:
        try:
            return orjson.loads(before + text + after)
        except orjson.JSONDecodeError as error:
            raise _malformed(error, text, start, before) from None


def _unmatched_brackets(masked: bytes) -> list[int]:
    """Return the places of the brackets in a piece whose other bracket is in another piece."""
    openers: list[int] = []
    closers: list[int] = []
    for found in _BRACKET.finditer(masked):
        place = found.start()
        if masked[place] in b"[{":
            openers.append(place)
        elif openers:
            openers.pop()
        else:
            closers.append(place)
    return closers + openers
