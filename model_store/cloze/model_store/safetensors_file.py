"""Reads files of the format safetensors with numpy, so that a server needs no further package.

Source: https://huggingface.co/docs/safetensors, section "Format".
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 4 * 2**20
_METADATA: Final = "__metadata__"
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}

Tensors = dict[str, NDArray[np.float32]]


def parse_safetensors(data: bytes) -> tuple[Tensors, Mapping[str, Any]]:
    """Return the tensors of a file in float32, by name, and its metadata.

    Raises:
        ValueError: the bytes are not a file of the format, or a tensor is not of floats, or has a
            number that is not finite.
    """
    header_bytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
    first = _LENGTH_BYTES + header_bytes
    if not 2 <= header_bytes <= _MAX_HEADER_BYTES or first > len(data):
        raise ValueError("is not a safetensors file: its header does not fit into it")
    try:
        places = json.loads(data[_LENGTH_BYTES:first])
        metadata = dict(places.pop(_METADATA, {}))
        tensors = {name: _tensor(name, place, data, first) for name, place in places.items()}
    except (AttributeError, KeyError, RecursionError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not a safetensors file: {type(error).__name__} in header") from None
    if sum(end - begin for begin, end in (p["data_offsets"] for p in places.values())) != (
        len(data) - first
    ):
        raise ValueError("is not a safetensors file: it has bytes of no tensor, or of two")
    return tensors, metadata


def _tensor(name: str, place: dict[str, Any], data: bytes, first: int) -> NDArray[np.float32]:
    kind, shape, (begin, end) = place["dtype"], place["shape"], place["data_offsets"]
    if kind not in _DTYPES:
        raise ValueError(f"the tensor {name!r} is {kind!a}; allowed are {', '.join(_DTYPES)}")
    dtype = _DTYPES[kind]
    if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
        raise ValueError(f"the tensor {name!r} has a malformed shape or place")
    if end - begin != math.prod(shape) * dtype.itemsize or first + end > len(data):
        raise ValueError(f"the tensor {name!r} has {end - begin} bytes, but its shape is {shape}")
    values = np.frombuffer(data, dtype, math.prod(shape), first + begin).reshape(shape)
    if kind == "BF16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    floats: NDArray[np.float32] = values.astype(np.float32)
    if not np.isfinite(floats).all():
        raise ValueError(f"the tensor {name!r} has a number that is not finite")
    return floats
