"""Strategies that damage valid inputs: JSON values by structure, and any input by bytes."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

WORDS = ["", "..", "fp16", "packed", "nsp", "weights.bin", "9999-12-31T23:59:59Z"]
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.sampled_from([2**31, 2**63, 10**18, 10**400, -1])
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.sampled_from(WORDS)
)
json_values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def paths_of(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON value."""
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value))
    for key, each in items:
        yield (*path, key)
        yield from paths_of(each, (*path, key))


def nested(depth: int) -> list[Any]:
    """Return a list of lists, so deep."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def alike(value: object) -> st.SearchStrategy[Any]:
    """Return values of the same type, which pass a check of types alone."""
    if isinstance(value, bool) or value is None:
        return st.booleans()
    if isinstance(value, int):
        return st.sampled_from(
            [-1, 0, 1, 2, 3, value + 1, 2**31, 2**32 + 1, 2**40, 2**63 - 1, 2**64 + 1]
        )
    if isinstance(value, float):
        return st.floats()
    if isinstance(value, str):
        return st.sampled_from(["", "x", value + value, value[:-1], *WORDS])
    if isinstance(value, bytes):
        return st.binary(max_size=len(value) + 4)
    if isinstance(value, list):
        return st.sampled_from([[], value[1:], value + value, value[::-1]])
    return st.just({})


@st.composite
def damaged_json(draw: st.DrawFn, value: Any) -> Any:
    """Draw a copy of a JSON value of which one part is removed, changed, renamed or repeated."""
    value = copy.deepcopy(value)
    paths = sorted(paths_of(value), key=lambda path: (-len(path), repr(path)))
    if not paths:
        return draw(json_values)
    parent, last = _place(value, draw(st.sampled_from(paths)))
    change = draw(
        st.sampled_from(["alike", "alike", "copy", "replace", "remove", "rename", "wrap", "nest"])
    )
    if change == "alike":
        parent[last] = draw(alike(parent[last]))
    elif change == "copy":
        other, key = _place(value, draw(st.sampled_from(paths)))
        parent[last] = copy.deepcopy(other[key])
    elif change == "replace":
        parent[last] = draw(json_values)
    elif change == "wrap":
        parent[last] = draw(st.sampled_from([[parent[last]], {"value": parent[last]}]))
    elif change == "nest":
        parent[last] = nested(draw(st.sampled_from([10, 150, 250])))
    elif change == "rename" and isinstance(parent, dict):
        parent[draw(st.text(max_size=5))] = parent.pop(last)
    elif change == "rename":
        parent.append(copy.deepcopy(parent[last]))
    else:
        del parent[last]
    return value


def _place(value: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the object or list that holds the value at a path, and the value's key in it."""
    *parents, last = path
    for key in parents:
        value = value[key]
    return value, last


@st.composite
def damaged_bytes(draw: st.DrawFn, inputs: st.SearchStrategy[bytes]) -> bytes:
    """Draw an input with a few bytes changed, removed or inserted, or without its end."""
    data = bytearray(draw(inputs))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 4))
        data[place : place + length] = draw(st.binary(max_size=4))
    if draw(st.integers(0, 7)) == 0:
        del data[draw(st.integers(0, len(data))) :]
    return bytes(data)
