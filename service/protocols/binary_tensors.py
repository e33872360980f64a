"""The binary tensor data extension of the Open Inference Protocol.

The body is JSON, whose length a header states, and then the bytes of its binary tensors in their
order. Numbers are little-endian. Each text is its length, 4 bytes, and its UTF-8.

Source: Triton Inference Server, ``docs/protocol/extension_binary_data.md``.
"""

import struct
from typing import Final

from cloze.service.core import InvalidRequest, Location, MalformedRequest
from cloze.service.protocols.tensors import Tensor

HEADER: Final = "inference-header-content-length"
"""The header with the length of the JSON."""

_LENGTH: Final = struct.Struct("<I")


def split(data: bytes, length: str | None) -> tuple[bytes, memoryview]:
    """Return the JSON and the bytes of the tensors.

    Args:
        data: the body.
        length: the value of `HEADER`; None: the body is JSON.

    Raises:
        MalformedRequest: the header is no length within the body.
    """
    if length is None:
        return data, memoryview(b"")
    size = int(length) if length.isascii() and length.isdigit() and len(length) < 16 else -1
    if not 0 < size <= len(data):
        raise MalformedRequest(
            f"{HEADER}: a whole number from 1 to the {len(data)} bytes of the body, "
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


def write(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    if not isinstance(tensor.data, list):
        return tensor.data.astype(tensor.data.dtype.newbyteorder("<"), copy=False).tobytes()
    parts = []
    for text in tensor.data:
        encoded = text.encode()
        parts += [_LENGTH.pack(len(encoded)), encoded]
    return b"".join(parts)
