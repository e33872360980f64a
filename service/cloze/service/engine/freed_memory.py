"""Returns freed memory to the operating system, which glibc otherwise keeps."""

import ctypes
from contextlib import suppress


def return_freed_memory() -> None:
    """Return the freed memory of all threads."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
