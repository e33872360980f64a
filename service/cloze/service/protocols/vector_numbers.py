"""The numbers of vectors, as the requests of Cohere's, Jina's, Voyage's and vLLM's clients ask.

Sources: the released clients, cohere 7.3 and voyageai 0.5, and vLLM's OpenAPI document.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from cloze.service.core import Float32
from cloze.service.errors import InvalidRequest, Location
from cloze.service.http.body import BytesResponse
from cloze.service.http.routes import RAW
from cloze.service.protocols.protocol import LenientModel

_MOST_DESCRIBED: Final = 256
"""Most texts whose bytes a header describes, with about 110 bytes for each."""


def _int8(vectors: Float32) -> NDArray[Any]:
    """Return integers [n, D]; the largest absolute value of each vector becomes 127."""
    largest = np.abs(vectors).max(1, keepdims=True, initial=0.0)
    scaled: NDArray[Any] = vectors * (127 / np.maximum(largest, np.float32(1e-30)))
    integers: NDArray[Any] = np.rint(scaled).astype(np.int8)
    return integers


INTEGERS: Final[Mapping[str | None, Callable[[Float32], NDArray[Any]]]] = {
    "int8": _int8,
    "uint8": lambda vectors: _int8(vectors).view(np.uint8) + np.uint8(128),
    "binary": lambda vectors: (np.packbits(vectors > 0, axis=1) - np.uint8(128)).view(np.int8),
    "ubinary": lambda vectors: np.packbits(vectors > 0, axis=1),
}
"""Vectors [n, D] as integers. ``binary`` and ``ubinary`` have the signs of 8 numbers per integer:
[n, ceil(D / 8)]. The integers of ``int8`` have a scale per vector, which a cosine does not see. For
example, [0.6, -0.3] becomes [127, -64]. Those of ``uint8`` are larger by 128."""

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]

BYTES: Final = ("bytes", "bytes_only")
"""vLLM's formats of answers that have no JSON. A header of the first describes the bytes."""

METADATA: Final[Mapping[str, tuple[str, str]]] = {
    "metadata": ("string", 'what JSON has beside the vectors, and their places, for "bytes"')
}


class NumbersBody(LenientModel):
    """vLLM's fields of the bytes of numbers."""

    embed_dtype: EmbedDtype | None = None
    """vLLM's field: the type of numbers in base64 and bytes; default float32"""
    endianness: Endianness | None = None
    """vLLM's field: their order of bytes; native, the default, is little"""

    def written(self, vector: Float32) -> bytes:
        """Return the bytes of the numbers of an array of any shape, in the type asked for."""
        numbers = _CONVERSIONS[self.embed_dtype or "float32"](vector)
        dtype = numbers.dtype.newbyteorder(">" if self.endianness == "big" else "<")
        return numbers.astype(dtype, copy=False).tobytes()

    def base64(self, vector: Float32) -> str:
        """Return the bytes in base64."""
        return b64encode(self.written(vector)).decode()


@dataclass(frozen=True, slots=True)
class Envelope:
    """What an answer has beside its vectors; see `METADATA`."""

    id: str
    created: int
    model: str
    usage: Any


def check_described(form: str | None, texts: Any) -> None:
    """Raise an error if a header would describe the bytes of too many texts."""
    if form == "bytes" and isinstance(texts, list) and (count := len(texts)) > _MOST_DESCRIBED:
        raise InvalidRequest(
            f"is bytes, whose header describes up to {_MOST_DESCRIBED} texts, got {count}; send "
            "fewer texts, or ask for bytes_only",
            Location(("encoding_format",)),
        )


def bytes_answer(
    body: NumbersBody, form: str | None, vectors: Sequence[Float32], envelope: Envelope
) -> BytesResponse:
    """Return the bytes of vectors one after another, in one of the formats `BYTES`."""
    parts = [body.written(vector) for vector in vectors]
    headers, items, end = [], [], 0
    if form == "bytes":
        for index, (part, vector) in enumerate(zip(parts, vectors, strict=True)):
            start, end = end, end + len(part)
            dtype, endianness = body.embed_dtype or "float32", body.endianness or "native"
            items.append(
                {
                    "index": index,
                    "embed_dtype": dtype,
                    "endianness": endianness,
                    "start": start,
                    "end": end,
                    "shape": vector.shape,
                }
            )
        headers = [(b"metadata", json.dumps({**asdict(envelope), "data": items}).encode())]
    return BytesResponse(b"".join(parts), RAW.encode(), *headers)


def _bfloat16(values: Float32) -> NDArray[np.uint16]:
    """Return the upper halves of float32, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _fp8(values: Float32, mantissa: int, bias: int, largest: int) -> NDArray[Any]:
    """Return the nearest numbers of 8 bits, ties to even; larger ones become the largest.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning", table 1.

    Args:
        mantissa: bits of the mantissa.
        bias: bias of the exponent.
        largest: code of the largest finite number.
    """
    codes = np.arange(largest + 1)
    exponents, fractions = codes >> mantissa, (codes & (1 << mantissa) - 1) / (1 << mantissa)
    magnitudes = np.where(exponents > 0, 1 + fractions, 2 * fractions) * 2.0 ** (exponents - bias)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    below = np.searchsorted(middles, np.abs(values), "left")
    above = np.searchsorted(middles, np.abs(values), "right")  # differs for a tie
    nearest: NDArray[Any] = np.where(below % 2 == 0, below, above)
    with_sign: NDArray[Any] = (nearest | np.signbit(values) << 7).astype(np.uint8)
    return with_sign


_CONVERSIONS: Final[Mapping[EmbedDtype, Callable[[Float32], NDArray[Any]]]] = {
    "float32": lambda values: values,
    "float16": lambda values: values.astype(np.float16),
    "bfloat16": _bfloat16,
    "fp8_e4m3": lambda values: _fp8(values, 3, 7, 126),
    "fp8_e5m2": lambda values: _fp8(values, 2, 15, 123),
}
