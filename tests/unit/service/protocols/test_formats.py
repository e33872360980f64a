"""Bytes and tensors on the wire: what is read, what is refused, and what is written."""

import io
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cloze.service.http.routes import NPY
from cloze.service.protocols import native, protocol, tensors
from cloze.service.protocols.protocol import LenientModel, ignored_fields
from cloze.service.protocols.tensors import TaskTensors
from cloze.service.protocols.vector_numbers import INTEGERS, NumbersBody
from cloze.service.tasks import TASKS
from cloze.service.tasks.embed_all import TokenVectors
from cloze.service.tasks.nsp import NspLabel, RankedCandidate
from cloze.service.tasks.task import TextUsage
from tests.support.refusals import refused
from tests.support.tensor_requests import packed


def test_the_json_ends_where_the_header_says() -> None:
    head, rest = tensors.split(b'{"a":1}xyz', b"7")
    assert (head, bytes(rest)) == (b'{"a":1}', b"xyz")
    head, rest = tensors.split(b"{}", b"2")
    assert (head, bytes(rest)) == (b"{}", b"")
    head, rest = tensors.split(b"{}", None)
    assert (head, bytes(rest)) == (b"{}", b"")


def test_texts_are_their_bytes() -> None:
    texts = ["red", "", "é\N{SNOWMAN}"]
    data = packed(*(text.encode() for text in texts))
    assert tensors.read_texts(memoryview(data), "text", 3) == texts
    assert tensors.write_tensor(texts) == data
    assert tensors.read_texts(memoryview(b""), "text", 0) == []
    with refused("limit_exceeded", 2, at="text"):
        tensors.read_texts(memoryview(data), "text", 2)


def test_numbers_are_little_endian() -> None:
    big = np.array([[1, 2]], ">f4")
    assert tensors.write_tensor(big) == struct.pack("<2f", 1, 2)


def written(task: str, value: Any, asked: Sequence[str] = ()) -> dict[str, Any]:
    outputs = TaskTensors(TASKS[task]).to_outputs(value, asked, len(value))
    return {
        name: data if isinstance(data, list) else data.tolist() for name, data in outputs.items()
    }


def test_a_column_that_some_entries_have() -> None:
    made = written("nsp", [[NspLabel("IsNext", 0.5)], [RankedCandidate(1, 0.25, "a")]])
    assert (made["index"], made["text"], made["label"]) == ([0, 1], ["", "a"], ["IsNext", ""])


RAW = "application/octet-stream"
ROWS = np.array([[0.5, -1.0, 0.0], [2.0, 0.25, -0.5]], np.float32)


def response_of(accept: str) -> tuple[bytes, dict[str, str]]:
    chosen = native.vector_format(accept.encode())
    response = native.vector_bytes(ROWS, *chosen)
    return bytes(response.body), {n.decode(): v.decode() for n, v in response.raw_headers}


@pytest.mark.parametrize(
    "accept",
    ["", "*/*", f"{RAW};q=0.5, application/json", f"{RAW};q=0", f"application/json, {RAW}",
     f"{RAW}, application/json", "application/*", f"{RAW};q=0.2, */*;q=0.3"],
)  # fmt: skip
def test_vectors_are_json_unless_another_type_is_preferred(accept: str) -> None:
    assert native.vector_format(accept.encode()) is None


@pytest.mark.parametrize(
    "accept",
    [f"application/json;q=0.5, {RAW}", RAW.upper(), f"text/html, {RAW} ; dtype=float32;q=0.5"],
)
def test_vectors_are_raw_bytes_if_preferred(accept: str) -> None:
    body, headers = response_of(accept)
    assert body == ROWS.astype("<f4").tobytes()
    assert headers["content-type"] == RAW
    assert (headers["x-dtype"], headers["x-shape"]) == ("float32", "2,3")
    assert "x-scale" not in headers


def test_vectors_of_fewer_bits() -> None:
    body, headers = response_of(f"{RAW}; dtype=float16")
    assert np.frombuffer(body, "<f2").tolist() == ROWS.ravel().tolist()
    body, headers = response_of(f'{RAW}; dtype="int8"')
    assert np.frombuffer(body, np.int8).tolist() == [32, -64, 0, 127, 16, -32]
    assert float(headers["x-scale"]) == pytest.approx(2 / 127)
    body, headers = response_of(f"{RAW}; dtype=ubinary")
    assert np.frombuffer(body, np.uint8).tolist() == [0b10000000, 0b11000000]
    assert headers["x-shape"] == "2,1"
    zeros, scale = native.DTYPES["int8"](np.zeros((1, 2), np.float32))
    assert (zeros.tolist(), scale) == ([[0, 0]], 1.0)
    for accept in (f"{RAW}; dtype=float64", f"{NPY}; dtype="):
        with refused("invalid_value"):
            native.vector_format(accept.encode())


def test_vectors_in_the_format_of_numpy() -> None:
    body, headers = response_of(NPY)
    assert np.load(io.BytesIO(body)).tolist() == ROWS.tolist()
    assert headers["content-type"] == NPY


def test_lists_of_arrays_have_their_lengths() -> None:
    several = [ROWS, ROWS[:1]]
    response = native.vector_bytes(several, RAW, "float32")
    headers = dict(response.raw_headers)
    assert (headers[b"x-lengths"], headers[b"x-shape"]) == (b"2,1", b"3,3")
    assert bytes(response.body) == np.concatenate(several).tobytes()


class Inner(LenientModel):
    known: int = 0


class Outer(LenientModel):
    parameters: Inner | None = None


def test_unknown_fields_are_named_in_a_warning() -> None:
    def warned(**fields: Any) -> str:
        body = Outer.model_validate(fields)
        warning = ignored_fields(body, body.parameters or Inner())
        return warning.removeprefix("ignored unknown fields: ")

    assert warned(a=1, parameters={"b": 2}) == "a, parameters.b"
    many = {f"f{n}": 1 for n in range(9)}
    assert warned(**many) == "f0, f1, f2, f3, f4, f5, f6, f7 and 1 more"
    assert " more" not in warned(**dict(list(many.items())[:8]))
    assert warned(**{"x" * 41: 1}) == "x" * 40
    assert warned(**{"é\n": 1}) == "\\xe9\\n"
    at_root = Inner.model_validate({"a": 1})
    assert ignored_fields(at_root, at_root).endswith(" a")


VECTORS = np.arange(60, dtype=np.float32).reshape(12, 5) / 7
LARGE = [
    VECTORS,
    VECTORS[:0],
    VECTORS.reshape(-1),
    VECTORS.reshape(3, 4, 5),
    [TokenVectors(VECTORS, [None, (0, 3)]), TokenVectors(VECTORS[:1], [None])],
    {"result": [VECTORS, VECTORS[:1]], "usage": [TextUsage(3, 3)]},
    [[NspLabel("IsNext", 0.5)], [], {}],
    "text",
]


@pytest.mark.parametrize("value", LARGE)
@pytest.mark.parametrize("numbers", [1, 7, 10, 1000])
def test_json_in_parts_is_that_of_the_whole(
    value: Any, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_PART_NUMBERS", numbers)
    response, whole = protocol.json_response(value, in_parts=True), protocol.json_response(value)
    assert response.body == whole.body
    assert response.raw_headers == whole.raw_headers


def test_no_part_has_more_numbers_than_the_limit() -> None:
    """The interpreter runs no other thread while a part is written."""
    texts = [np.zeros((400, 768), np.float32)] * 2
    for value in (texts, [TokenVectors(texts[0], [])], {"result": texts}, np.concatenate(texts)):
        counts = [bytes(part).count(b"0.0") for part in protocol.json_parts(value)]
        assert max(counts) == 65_536 // 768 * 768
        assert sum(counts) % (400 * 768) == 0


TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("dtype", TORCH)
def test_the_bytes_are_those_of_torch(dtype: str) -> None:
    """For all bfloat16 up to 400, of both signs, which include all ties between 8-bit numbers."""
    exact = np.arange(0x43C9, dtype=np.uint32) << 16
    random = np.random.default_rng(1).normal(size=3000).astype(np.float32)
    values = np.concatenate([exact.view(np.float32), random])
    values = np.stack([values, -values])
    converted = torch.from_numpy(values).to(TORCH[dtype])
    size = converted.element_size()
    expected = converted.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]).numpy()
    for endianness, order in (("native", "<"), ("little", "<"), ("big", ">")):
        body = NumbersBody.model_validate({"embed_dtype": dtype, "endianness": endianness})
        written = np.frombuffer(body.written(values), f"{order}u{size}")
        assert (written == expected.view(f"u{size}").ravel()).all()


def test_larger_numbers_become_the_largest() -> None:
    for dtype, largest in (("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)):
        body = NumbersBody.model_validate({"embed_dtype": dtype})
        data = body.written(np.array([1e9, -1e9], np.float32))
        numbers = torch.frombuffer(bytearray(data), dtype=TORCH[dtype]).float()
        assert numbers.tolist() == [largest, -largest]


def test_integers_have_a_scale_per_vector() -> None:
    vectors = np.array([[0.6, -0.3, 0.0], [0.0, 0.0, 0.0], [-2.0, 1.0, 2.0]], np.float32)
    expected = [[127, -64, 0], [0, 0, 0], [-127, 64, 127]]
    assert INTEGERS["int8"](vectors).tolist() == expected
    unsigned = INTEGERS["uint8"](vectors)
    assert unsigned.dtype == np.uint8
    assert unsigned.tolist() == [[number + 128 for number in row] for row in expected]
