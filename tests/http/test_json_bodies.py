"""Large JSON bodies: their limits, and their errors."""

import time
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from cloze.service.errors import MalformedRequest, RequestTooLarge
from cloze.service.http.body import SHORT_BYTES, BodyLimits, load
from cloze.service.protocols.native import body_type
from cloze.service.tasks import TASKS

NO_LIMITS = BodyLimits(10**9, 10**9, 10**9)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" + b"1," * 40_000 + b"]", "byte 80000"),
        (b"[" + b"1," * 40_000 + b"1", "unexpected end of data"),
        (b" " * 80_000, "the body is empty"),
        (b"[" * 100_000, "depth limit exceeded at byte 1025"),
        (b"]" * 1_000_000, "expected a JSON value at byte 0"),
    ],
)
def test_errors_of_large_bodies(data: bytes, message: str) -> None:
    with pytest.raises(MalformedRequest, match=message):
        load(data, NO_LIMITS)


def test_no_number_takes_the_parser_long() -> None:
    """A number is parsed in one call, which keeps the interpreter; 8 MB take 0.03 s."""
    begun = time.thread_time()
    value = load(b"[0." + b"1" * 8_000_000 + b"]", NO_LIMITS)
    assert value == [pytest.approx(1 / 9)]
    with pytest.raises(MalformedRequest, match="number is infinity"):
        load(b"[" + b"1" * 8_000_000 + b"]", NO_LIMITS)
    assert time.thread_time() - begun < 1.0


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
def test_the_limits_admit_every_short_body(texts: int) -> None:
    limits = BodyLimits.of_requests(8_000_000, texts, 1)
    assert limits.max_parts >= SHORT_BYTES // 2
    assert limits.max_values >= SHORT_BYTES // 2


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
