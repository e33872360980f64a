"""Decompresses gzip data within a limit, in a time linear in the data."""

import zlib
from typing import Final

from cloze.service.errors import MalformedRequest, RequestTooLarge
from cloze.service.threads import check_awaited

MAX_MEMBERS: Final = 1000
"""Most members of a body. Compressors write one; those that work in blocks one per 64 KiB."""


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
            member = zlib.decompressobj(wbits=31)  # gzip with the largest window
        taken = data[at : at + 16_384]  # zlib copies the bytes that it does not take
        if not taken:
            raise MalformedRequest("the body is not gzip: it ends too early")
        try:
            content += member.decompress(taken, 262_144)
        except zlib.error as error:
            raise MalformedRequest(f"the body is not gzip: {error}") from None
        at += len(taken) - len(member.unused_data if member.eof else member.unconsumed_tail)
        if len(content) > limit:
            raise RequestTooLarge(f"the decompressed body has over {limit} bytes, the limit")
    return bytes(content)
