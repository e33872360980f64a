"""Another operating system for the modules of Cloze: what they import lacks what Linux has.

Only modules whose names begin with ``cloze`` get the changed modules. Python's library and other
packages run as on this system, as those of macOS do on macOS. Linux's files of the kernel are
missing. On Windows, no folder can be opened, nothing that is open or mapped can be renamed, replaced
or removed, and text without a named encoding is ASCII.

    python -c "from tests.support.other_system import run_on; run_on('win32'); ..."
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
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

ENVIRONMENT = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Lets Python read and write ASCII where a program names no encoding."""

LINUX = {
    "os": {
        *("eventfd", "memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate"),
        *("sched_getaffinity", "sched_setaffinity", "sync_file_range"),
    },
    "select": {"epoll"},
}
"""Attributes of Python's modules that only Linux has, of those that a server could use."""

POSIX = {
    "os": {
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "PRIO_PROCESS", "chown"),
        *("fchmod", "fchown", "fork", "geteuid", "getegid", "getgid", "getloadavg", "getpgid"),
        *("getpriority", "getuid", "killpg", "mkfifo", "nice", "pread", "pwrite", "sendfile"),
        *("set_blocking", "setpriority", "setsid", "statvfs", "sync", "sysconf", "uname", "wait4"),
    },
    "select": {"poll", "POLLOUT"},
    "signal": {"SIGALRM", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGUSR1", "SIGUSR2", "SIGCHLD"},
    "socket": {"AF_UNIX", "SO_REUSEPORT", "MSG_DONTWAIT", "send_fds", "recv_fds"},
}
"""Attributes that macOS has too, and Windows lacks."""

POSIX_MODULES = frozenset({"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty", "uvloop"})


class Changed(ModuleType):
    """A module without some attributes and with others."""

    def __init__(self, module: ModuleType, without: set[str], changed: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(changed)
        self._module, self._without = module, without

    def __getattr__(self, name: str) -> Any:
        if name in self._without:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._module, name)


def _open(path: Any, flags: int, mode: int = 0o777) -> int:
    if Path(path).is_dir():
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, flags, mode)


def _fsync(descriptor: int) -> None:
    if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY):
        raise OSError(errno.EBADF, "Bad file descriptor")
    os.fsync(descriptor)


def _closed(path: Path) -> Path:
    """Return the path of a file or folder; raise if this process has it open, or a file in it."""
    process, real = psutil.Process(), path.resolve()
    used = [Path(file.path) for file in (*process.open_files(), *process.memory_maps())]
    if any(file.is_relative_to(real) for file in used):
        raise PermissionError(errno.EACCES, "the file is used", str(path))
    return path


def _new(path: Path) -> Path:
    """Return the path if it names nothing yet; on Windows, a rename replaces no file."""
    if path.exists():
        raise FileExistsError(errno.EEXIST, "File exists", str(path))
    return path


class _Library(ctypes.CDLL):
    """The C library of macOS, which lacks functions; Windows has none without a name."""

    def __init__(self, name: str | None, *arguments: Any) -> None:
        if name is None and CHANGES["sys"]["platform"] == "win32":
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *arguments)

    def __getattr__(self, name: str) -> Any:
        if name in ("mallopt", "malloc_trim", "prctl", "sched_getcpu"):
            raise AttributeError(name)
        return super().__getattr__(name)


def _no_signal_handler(*_: Any) -> None:
    raise NotImplementedError


MODULES = (ctypes, os, select, signal, socket, sys)

CHANGES: dict[str, dict[str, Any]] = {
    "ctypes": {"CDLL": _Library, "PyDLL": _Library},
    "os": {},
    "select": {},
    "signal": {},
    "socket": {},
    "sys": {},
}


def run_on(platform: str) -> None:
    """Let the modules of Cloze that are imported from now on run on ``darwin`` or ``win32``."""
    without = {module.__name__: LINUX.get(module.__name__, set()) for module in MODULES}
    lacking: frozenset[str] = frozenset()
    CHANGES["sys"]["platform"] = platform
    if platform == "win32":
        without = {name: names | POSIX.get(name, set()) for name, names in without.items()}
        lacking = POSIX_MODULES
        CHANGES["os"] |= {"open": _open, "fsync": _fsync}
        CHANGES["socket"]["SO_EXCLUSIVEADDRUSE"] = socket.SO_REUSEADDR
        asyncio.SelectorEventLoop.add_signal_handler = _no_signal_handler
        rename, replace, unlink = Path.rename, Path.replace, Path.unlink
        Path.rename = lambda path, target: rename(_closed(path), _new(Path(target)))
        Path.replace = lambda path, target: replace(_closed(path), _closed(Path(target)))
        Path.unlink = lambda path, **options: unlink(_closed(path), **options)
    changed = {m.__name__: Changed(m, without[m.__name__], CHANGES[m.__name__]) for m in MODULES}
    real_import, real_open, real_iterdir = builtins.__import__, Path.open, Path.iterdir

    def imported(name: str, scope: Any = None, *arguments: Any, **options: Any) -> ModuleType:
        if (scope or {}).get("__name__", "").startswith("cloze"):
            if name in lacking:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in changed:
                return changed[name]
        return real_import(name, scope, *arguments, **options)

    def check(path: Path) -> Path:
        if path.is_absolute() and path.parts[1] in ("proc", "sys"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return path

    builtins.__import__ = imported
    Path.open = lambda path, *args, **options: real_open(check(path), *args, **options)  # reads too
    Path.iterdir = lambda path: real_iterdir(check(path))
