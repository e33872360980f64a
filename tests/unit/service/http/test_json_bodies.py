"""JSON bodies: their limits, and refusals that name their place."""

import orjson
import pytest

from cloze.service.errors import MalformedRequest, RequestTooLarge
from cloze.service.http.body import SHORT_BYTES, BodyLimits, load
from tests.support.refusals import refused

FREE = BodyLimits(10**9, 10**9, 10**9)
SIZES = (2, 3, 4, 5, 7, 9, 20)


@pytest.mark.parametrize("size", [*SIZES, SHORT_BYTES])
def test_what_is_not_utf_8_is_named_with_its_place(size: int) -> None:
    text = '{"a": 1, "b": ["x", "für", [2, {"é": 3}]]}'
    for wrong in ("ü", "é"):
        data = text.encode().replace(wrong.encode(), wrong.encode("latin-1"))
        place = data.index(wrong.encode("latin-1"))
        with pytest.raises(MalformedRequest, match=f"byte {place} is 0x{ord(wrong):02x} "):
            load(data, FREE, size)
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
        for sent in (text, text.replace(",", " " * 40 + ",")):
            with pytest.raises(MalformedRequest, match="begins as UTF-16 or UTF-32, at byte 0"):
                load(sent.encode(encoding), FREE, size)


@pytest.mark.parametrize("size", [*SIZES, SHORT_BYTES])
def test_a_byte_order_mark_of_utf_8_is_ignored(size: int) -> None:
    """RFC 8259, section 8.1, allows that; PowerShell writes one."""
    text = '{"a": [1, "é"], "b": 2}'
    assert load(text.encode("utf-8-sig"), FREE, size) == orjson.loads(text)
    with refused("malformed_body"):
        load("".encode("utf-8-sig"), FREE, size)
    with refused("malformed_body", 16):
        load('{"aa": [1, 2]]'.encode("utf-8-sig") + b" ", FREE, SHORT_BYTES)


@pytest.mark.parametrize(
    ("data", "parts", "values"),
    [
        (b'["a", "b"]', 3, 2),
        (b"[[1], {}]", 3, 4),
        (b'{"a": 1, "b": {"c": 2}}', 5, 3),
        (b"[1, 2, 3, 4]", 1, 4),
        (b'[",", "[{"]', 3, 2),
    ],
)
def test_the_limits_of_parts_and_values(data: bytes, parts: int, values: int) -> None:
    for size in (2, 3, 5):
        assert load(data, BodyLimits(10**9, parts, values), size) == orjson.loads(data)
        with refused("body_too_large", parts - 1):
            load(data, BodyLimits(10**9, parts - 1, values), size)
        with refused("body_too_large", values - 1):
            load(data, BodyLimits(10**9, parts, values - 1), size)
    assert load(data, BodyLimits(10**9, 0, 0), len(data)) == orjson.loads(data), "a short body"


def test_limits_that_follow_from_those_of_requests() -> None:
    assert BodyLimits.of_requests(7, 4096, 1000) == BodyLimits(7, 65_536, 66_536)
    assert BodyLimits.of_requests(7, 1, 1000) == BodyLimits(7, 32_768, 33_768)
    assert load(b"[" + b"1," * 32_766 + b"11]", BodyLimits(10**9, 1, 1))[-1] == 11
    with pytest.raises(RequestTooLarge):
        load(b"[" + b"1," * 32_766 + b"111]", BodyLimits(10**9, 1, 1))
