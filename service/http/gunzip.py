"""Decompresses gzip data in pieces, in a time linear in the data."""

import zlib
from typing import Final

from cloze.service.core import MalformedRequest, RequestTooLarge

MAX_MEMBERS: Final = 1000
"""Most members of a body. Compressors write one; those that work in blocks one per 64 KiB."""

_GZIP: Final = 31
"""zlib's ``wbits`` for the gzip format with the largest window."""

_INPUT_BYTES: Final = 16_384
"""Most bytes that are passed to zlib at once; it copies those that it does not take."""

_CONTENT_BYTES: Final = 262_144
"""A piece ends when it has this size, or when this much of the data was read."""


class Gunzip:
    """The content of gzip data, which may have several members."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0  # of the next byte that zlib has not taken
        self._member = zlib.decompressobj(wbits=_GZIP)
        self._members = 1

    @property
    def is_done(self) -> bool:
        """Whether all content has been returned."""
        return self._at == len(self._data) and (not self._at or self._member.eof)

    def piece(self) -> bytes:
        """Return the next bytes of the content, about `_CONTENT_BYTES` at most.

        Raises:
            RequestTooLarge: the data has more than `MAX_MEMBERS` members.
            MalformedRequest: the data is not gzip, or is cut.
        """
        content = bytearray()
        read_until = self._at + _CONTENT_BYTES
        while not self.is_done and self._at < read_until and len(content) < _CONTENT_BYTES:
            if self._member.eof:
                if self._members == MAX_MEMBERS:
                    members = f"over {MAX_MEMBERS} members, the limit"
                    raise RequestTooLarge(f"the gzip body has {members}")
                self._members += 1
                self._member = zlib.decompressobj(wbits=_GZIP)
            taken = self._data[self._at : self._at + _INPUT_BYTES]
            if not taken:
                raise MalformedRequest("the body is not gzip: it ends too early")
            try:
                content += self._member.decompress(taken, _CONTENT_BYTES)
            except zlib.error as error:
                raise MalformedRequest(f"the body is not gzip: {error}") from None
            member = self._member
            self._at += len(taken)
            self._at -= len(member.unused_data if member.eof else member.unconsumed_tail)
        return bytes(content)
