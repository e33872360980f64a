"""What operating systems do differently with files, memory and users, with a fallback for each.

psutil and filelock do the rest. `cloze.service.machine` has what only a server needs.
"""

import ctypes
import getpass
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's ``mallopt``."""


def open_to_read(file: Path) -> int:
    """Open a file and return its descriptor; raise for a link, and do not wait for a pipe's writer.

    Windows follows a link, and waits.
    """
    names = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
    return os.open(file, sum((getattr(os, name, 0) for name in names), os.O_RDONLY))


def sync(path: Path) -> None:
    """Write a file or a folder to the disk, so that a rename never precedes its content.

    Windows opens no folder, so a folder is left as it is.
    """
    flags = os.O_RDONLY
    if not hasattr(os, "O_DIRECTORY"):
        if path.is_dir():
            return
        flags = os.O_RDWR  # Windows flushes only what is open for writing
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(file: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a file, which the system releases when this process ends.

    Call `busy` if another process holds the lock; unless `busy` raises, wait for that process.
    Where the file cannot be written, or its file system has no locks, hold nothing.
    """
    from filelock import FileLock, Timeout  # takes 12 ms that most commands do not need

    # By default, filelock takes the existing file for a lock where the file system has none, and
    # waits for a process that ended long ago.
    lock = FileLock(file, fallback_to_soft=False)
    with ExitStack() as stack:
        with suppress(OSError):
            try:
                stack.enter_context(lock.acquire(blocking=False))
            except Timeout:
                busy()
                stack.enter_context(lock.acquire())
        yield


def user() -> str:
    """Return the number of the user whose rights this process has; on Windows the name."""
    return str(os.geteuid()) if hasattr(os, "geteuid") else getpass.getuser()


def keep_freed_memory() -> None:
    """Make malloc keep the memory that is freed, until `return_freed_memory`.

    By default, glibc returns large tensors to the system, and the next step waits until the system
    has filled the same pages with zeros. Without glibc, nothing happens. docs/decisions/0010 has
    the measurements.
    """
    if mallopt := _of_the_c_library("mallopt"):
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Return the freed memory of all threads to the system; without glibc, nothing happens.

    Tensors of different sizes leave gaps, so the kept memory would grow with every step.
    """
    if trim := _of_the_c_library("malloc_trim"):
        trim(0)


def _of_the_c_library(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None if the library lacks it, as all but glibc."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # Windows
        return None
