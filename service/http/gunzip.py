"""Decompresses gzip data within a limit, in a time linear in the data."""

import zlib
from typing import Final

from cloze.service.errors import MalformedRequest, RequestTooLarge
from cloze.service.threads import check_awaited

MAX_MEMBERS: Final = 1000
"""Most members of a body. Compressors write one; those that work in blocks one per 64 KiB."""

_GZIP: Final = 31
"""zlib's ``wbits`` for the gzip format with the largest window."""

_INPUT_BYTES: Final = 16_384
"""Most bytes that are passed to zlib at once; it copies those that it does not take."""

_OUTPUT_BYTES: Final = 262_144
"""Most bytes that zlib returns at once."""


def gunzip(data: bytes, limit: int) -> bytes:
    """Return the content of gzip data, which may have several members.

    Raises:
        RequestTooLarge: the content has more than ``limit`` bytes, or the data more than
            `MAX_MEMBERS` members.
        MalformedRequest: the data is not gzip, or is cut.
    """
    content, at, members = bytearray(), 0, 0
    member = None
    while at < len(data) or (member is not None and not member.eof):
        check_awaited()
        if member is None or member.eof:
            members += 1
            if members > MAX_MEMBERS:
                raise RequestTooLarge(f"the gzip body has over {MAX_MEMBERS} members, the limit")
            member = zlib.decompressobj(wbits=_GZIP)
        taken = data[at : at + _INPUT_BYTES]
        if not taken:
            raise MalformedRequest("the body is not gzip: it ends too early")
        try:
            content += member.decompress(taken, _OUTPUT_BYTES)
        except zlib.error as error:
            raise MalformedRequest(f"the body is not gzip: {error}") from None
        at += len(taken) - len(member.unused_data if member.eof else member.unconsumed_tail)
        if len(content) > limit:
            raise RequestTooLarge(f"the decompressed body has over {limit} bytes, the limit")
    return bytes(content)
