"""A transport of messages between processes that keeps what is sent."""

import struct
from collections.abc import Callable
from typing import Any


class Wire:
    """Decodes what is sent."""

    def __init__(self, decode: Callable[[bytes], Any]) -> None:
        self._decode = decode
        self.sent: list[Any] = []

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def writelines(self, parts: list[bytes]) -> None:
        length, message = parts
        assert struct.unpack("=I", length) == (len(message),)
        self.sent.append(self._decode(message))

    def close(self) -> None:
        pass
