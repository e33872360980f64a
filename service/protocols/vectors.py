"""Writes vectors in the format that a client accepts: JSON, raw bytes or NumPy's file format.

The bytes may have fewer bits per number than float32: ``Accept: application/octet-stream;
dtype=int8``.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import Float32, InvalidRequest
from cloze.service.http.routes import JSON, NPY, RAW, BytesResponse

HEADERS: Final[Mapping[str, tuple[str, str]]] = {
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


def check(request: Request) -> None:
    """Check the dtype that a request accepts.

    Raises:
        InvalidRequest: there is no such dtype.
    """
    _accepted(request)


def respond(request: Request, values: Float32) -> Response:
    """Return vectors [n, D] float32, in the format that the client accepts.

    Args:
        request: the request, with an ``Accept`` header or none.
        values: [n, D] float32.
    """
    kind, dtype = _accepted(request)
    if kind == JSON:
        rows = values.astype("<f4", copy=False)
        return BytesResponse(orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY))
    return _respond_bytes(kind, dtype, values)


def respond_lists(request: Request, values: Sequence[Float32]) -> Response:
    """Return several arrays [S, D] float32; as bytes, one after the other.

    Args:
        request: the request, with an ``Accept`` header or none.
        values: at least one array.
    """
    kind, dtype = _accepted(request)
    if kind == JSON:
        return BytesResponse(orjson.dumps(list(values), option=orjson.OPT_SERIALIZE_NUMPY))
    lengths = b",".join(b"%d" % len(rows) for rows in values)
    return _respond_bytes(kind, dtype, np.concatenate(values), (b"x-lengths", lengths))


def _respond_bytes(
    kind: str, dtype: str, values: Float32, *headers: tuple[bytes, bytes]
) -> Response:
    converted, scale = DTYPES[dtype](values)
    if kind == NPY:
        file = io.BytesIO()
        np.save(file, converted)
        content = file.getvalue()
    else:
        content = converted.tobytes()
    return BytesResponse(
        content,
        kind.encode(),
        (b"x-dtype", dtype.encode()),
        (b"x-shape", b"%d,%d" % converted.shape),
        *([(b"x-scale", b"%.9g" % scale)] if scale is not None else []),
        *headers,
    )


def _accepted(request: Request) -> tuple[str, str]:
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
        weight = _number(parameters.get("q", "1"))
        if weight > best_weight or (weight == best_weight > 0 and kind == JSON):
            best, best_weight = (kind, parameters.get("dtype", "float32").strip('"')), weight
    kind, dtype = best
    if dtype not in DTYPES:
        raise InvalidRequest(f"Accept asks for dtype {dtype[:40]!a}; there are {', '.join(DTYPES)}")
    return kind, dtype


def _number(text: str) -> float:
    """Return the value of a weight; 1 if it is no number."""
    return float(text) if text.replace(".", "", 1).isdecimal() else 1.0
