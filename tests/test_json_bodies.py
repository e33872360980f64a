"""JSON bodies in pieces: the values and refusals of a parser that reads them whole."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.service.core import MalformedRequest, RequestTooLarge
from cloze.service.http.json_bodies import PIECE_BYTES, BodyLimits, load
from cloze.service.protocols.native import body_type
from cloze.service.tasks import TASKS

NO_LIMITS = BodyLimits(10**9, 10**9, 10**9)

NAMES = st.sampled_from(["", "a", "b", '"', "\\", "[", "},", "\u00e9"])
"""Few names, so that some objects have one twice."""

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(-1e9, 1e9) | NAMES
)

JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=30
)

DAMAGE = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(list(b'[]{},:"\\ 01.en')), st.booleans()), max_size=2
)


def damaged(data: bytes, damage: list[tuple[float, int, bool]]) -> bytes:
    for place, byte, replaces in damage:
        index = int(place * (len(data) - 1))
        data = data[:index] + bytes([byte]) + data[index + replaces :]
    return data


@given(value=JSON, spaced=st.booleans(), damage=DAMAGE, size=st.sampled_from([2, 3, 7, 20]))
@settings(max_examples=1500, deadline=None)
def test_pieces_have_the_value_of_the_whole(
    value: Any, spaced: bool, damage: list[tuple[float, int, bool]], size: int
) -> None:
    data = orjson.dumps(value, option=orjson.OPT_INDENT_2 if spaced else 0)
    data = damaged(data.replace(b'"b"', b'"a"'), damage)
    try:
        expected = orjson.loads(data)
    except orjson.JSONDecodeError:
        with pytest.raises(MalformedRequest):
            load(data, NO_LIMITS, size)
    else:
        assert load(data, NO_LIMITS, size) == expected


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": [1, 2], "a": 3, "": [4]}',
        b'{"a": 1, "b": 2, "a": [1, 2, {"a": [3, 4], "a": 5}], "c": {}}',
        rb'["\\", "\"", "\\\"", "a\\", "\u005b,"]',
        b"[[], {}, [[]], [{}], 1]",
    ],
)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 9])
def test_corners(data: bytes, size: int) -> None:
    assert load(data, NO_LIMITS, size) == orjson.loads(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"ids":[1e-' + b"0" * 200_000 + b"1]}", "a number has over 1024 characters"),
        (b"[" + b"1," * 40_000 + b"1]", None),
        (b"[" + b"1," * 40_000 + b"]", "byte 80"),
        (b"[" + b"1," * 40_000 + b",1]", "byte 80"),
        (b"[" + b"1," * 40_000 + b"1", "unexpected end of data"),
        (b"[" + b"1," * 40_000 + b"1}", "unexpected bracket at byte 80002"),
        (b"[1]," + b" " * 80_000 + b"[1]", "several values"),
        (b"[1]" + b" " * 80_000 + b".5", "not JSON"),
        (b" " * 80_000, "the body is empty"),
    ],
)
def test_errors_of_large_bodies(data: bytes, message: str | None) -> None:
    if message is None:
        assert load(data, NO_LIMITS) == [1] * 40_001
        return
    with pytest.raises(MalformedRequest, match=message):
        load(data, NO_LIMITS)


@pytest.mark.parametrize("data", [b"]" * 1_000_000, b"[1" + b"}" * 1_000_000])
def test_brackets_that_never_begin_end_the_body_at_once(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(MalformedRequest, match="more brackets end than begin"):
        load(data, NO_LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000, "the places of a million brackets would be 36 MB"


def test_a_text_may_hold_any_number() -> None:
    data = b'["' + b"1" * 200_000 + b'"]'
    assert load(data, NO_LIMITS) == orjson.loads(data)


@pytest.mark.parametrize("unit", [b"[]", b"{}", b'""', b'{"a":1}', b"[[]]"])
def test_the_limits_of_parts(unit: bytes) -> None:
    limits = BodyLimits.of_requests(8_000_000, 2048, 1_048_576)
    assert limits.max_parts == 32_768
    assert len(load(b"[" + b",".join([unit] * 10_000) + b"]", limits)) == 10_000
    with pytest.raises(RequestTooLarge, match="over 32768 texts, lists and objects"):
        load(b"[" + b",".join([unit] * 32_768) + b"]", limits)


def test_the_limit_of_values_admits_every_token_of_a_request() -> None:
    limits = BodyLimits.of_requests(8_000_000, 2048, 1_048_576)
    ids = [[1] * 512] * 2048
    assert load(orjson.dumps({"inputs": ids}), limits) == {"inputs": ids}
    with pytest.raises(RequestTooLarge, match="over 1081344 values"):
        load(orjson.dumps([1] * 1_090_000), limits)


@pytest.mark.parametrize("texts", [1, 2048, 100_000])
def test_the_limits_admit_every_body_of_one_piece(texts: int) -> None:
    limits = BodyLimits.of_requests(8_000_000, texts, 1)
    assert limits.max_parts >= PIECE_BYTES // 2
    assert limits.max_values >= PIECE_BYTES // 2


@pytest.mark.parametrize("name", TASKS)
def test_validation_stops_at_the_first_error_everywhere(name: str) -> None:
    kinds = list(parts_of(body_type(TASKS[name]).__pydantic_core_schema__))
    repeating = [part for part in kinds if part["type"] in ("list", "tuple", "dict", "set")]
    assert all(part.get("fail_fast") for part in repeating)


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the core schemas that a core schema consists of."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        for part in schema.values():
            yield from parts_of(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from parts_of(part)
