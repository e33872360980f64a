"""Vectors and tensors as bytes.

Vectors have the format that a client accepts: JSON, raw bytes or NumPy's file format. The bytes may
have fewer bits per number than float32: ``Accept: application/octet-stream; dtype=int8``.

Tensors have the binary extension of the Open Inference Protocol. The body is JSON, whose length a
header states, and then the bytes of its binary tensors in their order. Numbers are little-endian.
Each text is its length, 4 bytes, and its UTF-8. Source: Triton Inference Server,
``docs/protocol/extension_binary_data.md``.
"""

import io
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from cloze.service.core import Float32, InvalidRequest, Location, MalformedRequest
from cloze.service.http.routes import JSON, NPY, RAW, BytesResponse
from cloze.service.protocols.protocol import json_response
from cloze.service.protocols.tensors import Tensor

VECTOR_HEADERS: Final[Mapping[str, tuple[str, str]]] = {
    "x-dtype": ("string", "type of the numbers of raw vectors, little-endian"),
    "x-shape": ("string", "shape of raw vectors: rows,columns"),
    "x-scale": ("number", "what int8 numbers are multiplied by"),
    "x-lengths": ("string", "rows of each text, if a text has a vector per token"),
}

_ANY = (b"", b"*/*", b"application/json")
"""Frequent values of ``Accept`` that select JSON, so that they need no parsing."""

_LARGEST_INT8 = 127

Convert = Callable[[Float32], tuple[NDArray[Any], float | None]]


def _int8(values: Float32) -> tuple[NDArray[Any], float]:
    """Return integers and their scale: the largest absolute value becomes 127."""
    scale = float(np.abs(values).max(initial=0.0)) / _LARGEST_INT8 or 1.0
    return np.rint(values / np.float32(scale)).astype(np.int8), scale


DTYPES: Final[Mapping[str, Convert]] = {
    "float32": lambda values: (values.astype("<f4", copy=False), None),
    "float16": lambda values: (values.astype("<f2"), None),
    "int8": _int8,
    "ubinary": lambda values: (np.packbits(values > 0, axis=1), None),
}
"""Conversions of vectors [n, D]. ``ubinary`` has the signs of 8 numbers per byte, the last one
filled up with zeros: [n, ceil(D / 8)]."""


def respond(request: Request, value: Any) -> BytesResponse:
    """Return a result in the format that the client accepts; only vectors have others than JSON.

    Args:
        request: the request, with an ``Accept`` header or none.
        value: vectors [n, D] float32; or at least one array [S, D] float32, which as bytes follow
            each other; or another result.
    """
    several = isinstance(value, list) and bool(value) and isinstance(value[0], np.ndarray)
    if not several and not isinstance(value, np.ndarray):
        return json_response(value)
    kind, dtype = accepted(request)
    if kind == JSON:
        return json_response(value)
    converted, scale = DTYPES[dtype](np.concatenate(value) if several else value)
    content = io.BytesIO()
    if kind == NPY:
        np.save(content, converted)
    else:
        content.write(converted.tobytes())
    headers = [(b"x-dtype", dtype.encode()), (b"x-shape", b"%d,%d" % converted.shape)]
    if scale is not None:
        headers.append((b"x-scale", b"%.9g" % scale))
    if several:
        headers.append((b"x-lengths", b",".join(b"%d" % len(rows) for rows in value)))
    return BytesResponse(content.getvalue(), kind.encode(), *headers)


def accepted(request: Request) -> tuple[str, str]:
    """Return the media type that a request prefers, JSON, raw bytes or NumPy, and its dtype.

    The type is JSON unless another type has a higher weight (RFC 9110, section 12.5.1).

    Raises:
        InvalidRequest: there is no such dtype.
    """
    accept = next((value for name, value in request.scope["headers"] if name == b"accept"), b"")
    if accept in _ANY:
        return JSON, "float32"
    best, best_weight = (JSON, "float32"), 0.0
    for item in accept.decode("latin-1").lower().split(","):
        kind, *rest = (part.strip() for part in item.split(";"))
        if kind in ("*/*", "application/*"):
            kind = JSON
        if kind not in (JSON, RAW, NPY):
            continue
        parameters = dict(part.partition("=")[::2] for part in rest)
        weight = _weight(parameters.get("q", "1"))
        if weight > best_weight or (weight == best_weight > 0 and kind == JSON):
            best, best_weight = (kind, parameters.get("dtype", "float32").strip('"')), weight
    kind, dtype = best
    if dtype not in DTYPES:
        raise InvalidRequest(f"Accept asks for dtype {dtype[:40]!a}; there are {', '.join(DTYPES)}")
    return kind, dtype


def _weight(text: str) -> float:
    """Return the value of a weight; 1 if it is no number."""
    return float(text) if text.replace(".", "", 1).isdecimal() else 1.0


# ---- tensors -------------------------------------------------------------------------------------


JSON_LENGTH: Final = "inference-header-content-length"
"""The header with the length of the JSON."""

_LENGTH: Final = struct.Struct("<I")


def split(data: bytes, length: str | None) -> tuple[bytes, memoryview]:
    """Return the JSON and the bytes of the tensors.

    Args:
        data: the body.
        length: the value of `JSON_LENGTH`; None: the body is JSON.

    Raises:
        MalformedRequest: the header is no length within the body.
    """
    if length is None:
        return data, memoryview(b"")
    size = int(length) if length.isascii() and length.isdigit() and len(length) < 16 else -1
    if not 0 < size <= len(data):
        raise MalformedRequest(
            f"{JSON_LENGTH}: a whole number from 1 to the {len(data)} bytes of the body, "
            f"got {ascii(length)[:40]}"
        )
    return data[:size], memoryview(data)[size:]


def read_texts(data: memoryview, at: Location, most: int) -> list[str]:
    """Return the texts of a binary tensor.

    Args:
        data: the bytes of the tensor.
        at: place of the tensor.
        most: most texts.

    Raises:
        InvalidRequest: the bytes are cut, a text is not UTF-8, or there are more texts.
    """
    texts: list[str] = []
    start = 0
    while start < len(data):
        if len(texts) == most:
            raise InvalidRequest(f"has over {most} texts, the limit", at)
        begin = start + _LENGTH.size
        end = begin + _LENGTH.unpack_from(data, start)[0] if begin <= len(data) else begin
        if end > len(data):
            raise InvalidRequest(f"ends within text {len(texts)}", at)
        try:
            texts.append(str(data[begin:end], "utf-8"))
        except UnicodeDecodeError:
            raise InvalidRequest(f"has a text, {len(texts)}, that is not UTF-8", at) from None
        start = end
    return texts


def write_tensor(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    if not isinstance(tensor.data, list):
        return tensor.data.astype(tensor.data.dtype.newbyteorder("<"), copy=False).tobytes()
    parts = []
    for text in tensor.data:
        encoded = text.encode()
        parts += [_LENGTH.pack(len(encoded)), encoded]
    return b"".join(parts)
