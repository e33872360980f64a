"""Another operating system for the modules of Cloze: a copy of what they import lacks POSIX.

Only modules whose names begin with ``cloze`` get the copies. Python's library and other packages
run as on this system, as those of Windows do on Windows. Linux's files of the kernel are missing,
no folder can be opened, and text without a named encoding is ASCII.

    python -c "from tests.support.other_system import take_away; take_away(); ..."
"""

import asyncio
import builtins
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ENVIRONMENT = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Lets Python read and write ASCII where a program names no encoding."""

MODULES = frozenset({"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty", "uvloop"})
ATTRIBUTES = {
    "os": {
        "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "PRIO_PROCESS", "chown", "chroot",
        "eventfd", "fchmod", "fchown", "fork", "geteuid", "getegid", "getgid", "getloadavg",
        "getpgid", "getpriority", "getuid", "killpg", "mkfifo", "memfd_create", "nice", "pidfd_open",
        "posix_fadvise", "pread", "pwrite", "sched_getaffinity", "sched_setaffinity", "sendfile",
        "setpriority", "setsid", "statvfs", "sync", "sync_file_range", "sysconf", "uname", "wait4",
    },
    "select": {"epoll", "poll"},
    "signal": {"SIGALRM", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGUSR1", "SIGUSR2", "SIGCHLD"},
    "socket": {"AF_UNIX", "SO_REUSEPORT", "MSG_DONTWAIT", "send_fds", "recv_fds"},
}  # fmt: skip


class Copy(ModuleType):
    """A module without some attributes and with others."""

    def __init__(self, module: ModuleType, without: set[str], changed: Mapping[str, Any]) -> None:
        super().__init__(module.__name__)
        kept = {name: value for name, value in vars(module).items() if name not in without}
        self.__dict__.update(kept | changed)


def _open(path: Any, flags: int, mode: int = 0o777) -> int:
    if Path(path).is_dir():
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, flags, mode)


def _fsync(descriptor: int) -> None:
    if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY):
        raise OSError(errno.EBADF, "Bad file descriptor")
    os.fsync(descriptor)


class _Library(ctypes.CDLL):
    def __init__(self, name: str | None, *arguments: Any) -> None:
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *arguments)


def _no_signal_handler(*_: Any) -> None:
    raise NotImplementedError


def take_away() -> None:
    """Let the modules of Cloze that are imported from now on run on the other system."""
    changed: dict[ModuleType, dict[str, Any]] = {
        os: {"open": _open, "fsync": _fsync},
        ctypes: {"CDLL": _Library, "PyDLL": _Library},
        select: {},
        signal: {},
        socket: {"SO_EXCLUSIVEADDRUSE": socket.SO_REUSEADDR},
    }
    copies = {
        module.__name__: Copy(module, ATTRIBUTES.get(module.__name__, set()), values)
        for module, values in changed.items()
    }
    real_import, real_open, real_iterdir = builtins.__import__, Path.open, Path.iterdir

    def imported(name: str, scope: Any = None, *arguments: Any, **options: Any) -> ModuleType:
        if (scope or {}).get("__name__", "").startswith("cloze"):
            if name in MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in copies:
                return copies[name]
        return real_import(name, scope, *arguments, **options)

    def check(path: Path) -> Path:
        if path.is_absolute() and path.parts[1] in ("proc", "sys"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return path

    builtins.__import__ = imported
    Path.open = lambda path, *args, **options: real_open(check(path), *args, **options)  # reads too
    Path.iterdir = lambda path: real_iterdir(check(path))
    asyncio.SelectorEventLoop.add_signal_handler = _no_signal_handler
