"""JSON in pieces: the same values as in one piece, and refusals that name their place."""

import asyncio
import threading

import orjson
import pytest
from pydantic import BaseModel

from cloze.service.abandonment import Abandoned, run_on_thread
from cloze.service.core import InvalidRequest, MalformedRequest, RequestTooLarge
from cloze.service.http.json_bodies import PIECE_BYTES, BodyLimits, load, validate

FREE = BodyLimits(10**9, 10**9, 10**9)
SIZES = (2, 3, 4, 5, 7, 9, 20)

DOCUMENTS = [
    b"[1, 2, 3]",
    b'{"a": 1, "b": [2, 3], "c": {"d": [], "e": {}}}',
    b'{"a": [1, 2], "a": 3, "": [4]}',
    b'{"a": 1, "b": 2, "a": [1, 2, {"a": [3, 4], "a": 5}], "c": {}}',
    rb'["\\", "\"", "\\\"", "a\\", "[,]{}", "\u005b,", ",\\\\"]',
    b'["a,b", ["c]", {"d}": "{e"}], "\\\\", 1, "\\\\\\"", 2]',
    b"[[], {}, [[]], [{}], [[], []], 1]",
    b'{"a": {}, "b": [], "c": [{}, {}], "d": null}',
    b" [ 1 , [ 2 ] , { } ] ",
    b'[1.5, -2e3, true, false, null, "x"]',
    b'{"a":{"b":{"c":[1,2,{"d":[3,4]}]}},"e":5}',
    '["é,", "\N{SNOWMAN}", 1]'.encode(),
]


@pytest.mark.parametrize("data", DOCUMENTS)
@pytest.mark.parametrize("size", SIZES)
def test_pieces_have_the_value_of_the_whole(data: bytes, size: int) -> None:
    assert load(data, FREE, size) == orjson.loads(data)


@pytest.mark.parametrize(
    "data",
    [
        b"[1, 2", b"[1, 2}", b"{1, 2}", b"[1,, 2]", b"[1, 2,]", b"[,1]", b'{"a", 1}', b'{"a": 1,}',
        b"[1] [2]", b"[1], [2]", b"1, 2", b"[1, 2]]", b"]", b"[1, 2] x", b'["a', b'["a\\"]',
        b'{"a": [1, 2}', b"[[1, 2]", b"[1 2, 3]", b'{"a": }', b'{"a": [1, 2], }', b"[truth, 1]",
        b'{"a": 1, {"b": 2}}', b'[{"a": 1, [2, 3]}]', b"[1, 2],", b"  ,", b"{,}", b"{}}", b"[[}]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", SIZES)
def test_what_is_no_json_is_refused_in_every_size(data: bytes, size: int) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(data)
    with pytest.raises(MalformedRequest, match=r"^the body is not JSON: "):
        load(data, FREE, size)


@pytest.mark.parametrize("size", [*SIZES, PIECE_BYTES])
def test_what_is_not_utf_8_is_named_with_its_place(size: int) -> None:
    text = '{"a": 1, "b": ["x", "für", [2, {"é": 3}]]}'
    for wrong in ("ü", "é"):
        data = text.encode().replace(wrong.encode(), wrong.encode("latin-1"))
        place = data.index(wrong.encode("latin-1"))
        message = f"byte {place} is 0x{ord(wrong):02x} (Latin-1?); send JSON as UTF-8"
        with pytest.raises(MalformedRequest) as caught:
            load(data, FREE, size)
        assert str(caught.value) == f"the body is not UTF-8: {message}"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
        for sent in (text, text.replace(",", " " * 40 + ",")):
            with pytest.raises(MalformedRequest) as caught:
                load(sent.encode(encoding), FREE, size)
            assert str(caught.value) == (
                "the body is not UTF-8: it begins as UTF-16 or UTF-32, at byte 0; "
                "send JSON as UTF-8"
            )


@pytest.mark.parametrize("size", [*SIZES, PIECE_BYTES])
def test_a_byte_order_mark_of_utf_8_is_ignored(size: int) -> None:
    """RFC 8259, section 8.1, allows that; PowerShell writes one."""
    text = '{"a": [1, "é"], "b": 2}'
    assert load(text.encode("utf-8-sig"), FREE, size) == orjson.loads(text)
    with pytest.raises(MalformedRequest, match="the body is empty"):
        load("".encode("utf-8-sig"), FREE, size)
    with pytest.raises(MalformedRequest, match=r"at byte 16$"):
        load('{"aa": [1, 2]]'.encode("utf-8-sig") + b" ", FREE, PIECE_BYTES)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b" \n", "the body is empty; send a JSON object"),
        (b"[1, x]", "the body is not JSON: unexpected character, expected a JSON value at byte 4"),
        (
            '["é", x]'.encode(),
            "the body is not JSON: unexpected character, expected a JSON value at byte 7",
        ),
        (
            b'["\\ud800"]',
            "the body is not JSON: no low surrogate in string at byte 2; \\ud800 to "
            "\\udfff, surrogates, must come in pairs",
        ),
    ],
)
def test_errors_of_small_bodies(data: bytes, message: str) -> None:
    with pytest.raises(MalformedRequest) as refused:
        load(data, FREE)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[11, 12, 13, x]", "unexpected character, expected a JSON value at byte 13"),
        (b'{"a": 11, "b": 12, "c": x}', "unexpected character, expected a JSON value at byte 24"),
        (b"[11, 12, 13, 14", "unexpected end of data"),
        (b"[11, 12, 13, 14}", "unexpected bracket at byte 15"),
        (b"[11, 12, 13]]", "unexpected bracket at byte 12"),
        (b"[11, 12], [13, 14]", "it has several values"),
        (b"[11, [, 12]]", "expected a value at byte 6"),
    ],
)
def test_errors_name_their_place(data: bytes, message: str) -> None:
    with pytest.raises(MalformedRequest) as refused:
        load(data, FREE, 4)
    assert str(refused.value) == f"the body is not JSON: {message}"


@pytest.mark.parametrize(
    "data",
    [
        b"[[1, [x, [2, 3]], 4], [5, 6]]",
        b"[[1, [2, x], 4], [5, 6]]",
        b"[[[1], [[2], x, [[3, 4]]]], 5]",
        b"[[1, 2], [3, [4, 5], x]]",
        b'{"a": {"b": [1, 2]}, "c": x, "d": {"e": [3]}}',
        b'[{"a": [1, 2, {"b": x}], "c": [[]]}]',
        b'[1, {"a": 2, "b": [[3], {"c": [4]}, x, [5]]}]',
    ],
)
@pytest.mark.parametrize("size", range(4, 40, 3))
def test_the_place_of_a_wrong_value_is_the_same_in_every_size(data: bytes, size: int) -> None:
    with pytest.raises(MalformedRequest, match=rf" at byte {data.index(b'x')}$"):
        load(data, FREE, size)


def test_lists_and_objects_may_be_1024_deep() -> None:
    for begin, end in ((b"[1,", b"]"), (b'{"b":1,"a":', b"}")):
        deep = begin * 1024 + b"0" + end * 1024
        value = load(deep, FREE, 64)
        depth = 0
        while isinstance(value, list | dict):
            value, depth = value[-1] if isinstance(value, list) else value["a"], depth + 1
        assert (value, depth) == (0, 1024)
        with pytest.raises(MalformedRequest, match="depth limit exceeded at byte"):
            load(begin * 1025 + b"0" + end * 1025, FREE, 64)


def test_a_number_has_a_limit_in_a_piece_without_a_comma() -> None:
    for number in (b"1" * 1024, b"-" + b"1" * 1000 + b".5e+10"):
        whole = b"[" + number + b"]"
        with pytest.raises(MalformedRequest, match=r"not JSON: (?!a number)"):
            load(whole + b"]", FREE, 2000)
    for number in (b"1" * 1025, b"1." + b"0" * 1100, b"1e-" + b"0" * 1100 + b"1"):
        data = b"[" + number + b"]" + b" " * 3000
        with pytest.raises(MalformedRequest, match=r"a number has over 1024 characters$"):
            load(data, FREE, 2000)
    assert load(b'["' + b"1" * 5000 + b'"]', FREE, 2000) == ["1" * 5000]
    assert load(b"[1, " + b"1" * 15 + b"]", FREE, 4) == [1, int("1" * 15)]


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
        with pytest.raises(RequestTooLarge) as refused:
            load(data, BodyLimits(10**9, parts - 1, values), size)
        assert str(refused.value) == (
            f"the body has over {parts - 1} texts, lists and objects, the limit"
        )
        with pytest.raises(RequestTooLarge) as refused:
            load(data, BodyLimits(10**9, parts, values - 1), size)
        assert str(refused.value) == f"the body has over {values - 1} values, the limit"
    assert load(data, BodyLimits(10**9, 0, 0), len(data)) == orjson.loads(data), "one piece"


def test_limits_that_follow_from_those_of_requests() -> None:
    assert PIECE_BYTES == 65_536
    assert BodyLimits.of_requests(7, 4096, 1000) == BodyLimits(7, 65_536, 66_536)
    assert BodyLimits.of_requests(7, 1, 1000) == BodyLimits(7, 32_768, 33_768)
    assert load(b"[" + b"1," * 32_766 + b"11]", BodyLimits(10**9, 1, 1))[-1] == 11
    with pytest.raises(RequestTooLarge):
        load(b"[" + b"1," * 32_766 + b"111]", BodyLimits(10**9, 1, 1))


def test_a_body_that_nobody_waits_for_is_read_no_further() -> None:
    begun, may_read = threading.Event(), threading.Event()
    ends: list[str] = []

    def read() -> None:
        begun.set()
        assert may_read.wait(10)
        try:
            load(b"[1, 2, 3]", FREE, 3)
            ends.append("read")
        except Abandoned:
            ends.append("abandoned")

    async def cancel() -> None:
        task = asyncio.create_task(run_on_thread(read))
        assert await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.wait([task])
        may_read.set()
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(cancel())
    assert ends == ["abandoned"]


class Texts(BaseModel):
    inputs: list[str]


def test_a_wrong_value_is_named_by_its_place_in_lists_too() -> None:
    with pytest.raises(InvalidRequest, match=r"^inputs\.1: "):
        validate(Texts, {"inputs": ["a", 5]})
    with pytest.raises(InvalidRequest, match=r"^inputs: "):
        validate(Texts, {"inputs": "a"})
    with pytest.raises(InvalidRequest, match=r"^inputs: "):
        validate(Texts, {})
    with pytest.raises(InvalidRequest, match=r"^the body: "):
        validate(Texts, ["a"])


def test_a_number_of_the_longest_length_is_no_long_number() -> None:
    """In a body of several pieces, whose masked piece is searched."""
    number = b"0." + b"1" * 1022
    assert load(b"[" + number + b"]" + b" " * 3000, FREE, 2000) == [float(number)]
