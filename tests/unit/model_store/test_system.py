"""Files, users and memory where the operating system lacks what Linux has."""

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloze.model_store import system


def as_on_windows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Open no folder, and flush only what is open for writing; return the names of what is."""
    real_open, real_fsync = os.open, os.fsync
    synced: list[str] = []

    def open_file(path: Path, flags: int) -> int:
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, flags)

    def fsync(descriptor: int) -> None:
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_RDWR:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real_fsync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "geteuid"):
        monkeypatch.delattr(os, name)
    return synced


def test_a_file_and_a_folder_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    file.chmod(0o400)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    system.sync(file)
    system.sync(tmp_path)
    assert synced == [file.stat().st_ino, tmp_path.stat().st_ino]


def test_on_windows_only_files_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x")
    synced = as_on_windows(monkeypatch)
    system.sync(tmp_path / "file")
    system.sync(tmp_path)
    assert synced == ["file"]
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_link_is_not_followed_where_the_system_can_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"):
        system.open_to_read(tmp_path / "link")
    as_on_windows(monkeypatch)
    with os.fdopen(system.open_to_read(tmp_path / "file"), "rb") as stream:
        assert stream.read() == b"content"


@pytest.mark.parametrize("error", [OSError, TypeError])
def test_without_glibc_memory_is_left_to_the_system(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    system.keep_freed_memory()
    system.return_freed_memory()

    def refuse(name: None) -> None:
        raise error

    for library in (refuse, lambda _: object()):
        monkeypatch.setattr(ctypes, "CDLL", library)
        system.keep_freed_memory()
        system.return_freed_memory()


class Busy(Exception):
    pass


def refuse() -> None:
    raise Busy


def test_a_lock_keeps_others_out_until_its_end(tmp_path: Path) -> None:
    with system.locked(tmp_path / "lock", refuse):
        with pytest.raises(Busy), system.locked(tmp_path / "lock", refuse):
            pass
        program = f"""
from pathlib import Path
from cloze.model_store.system import locked
with locked(Path({os.fspath(tmp_path / "lock")!r}), lambda: print("waits", flush=True)):
    print("has it")
"""
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline() == "waits\n"
    assert other.communicate(timeout=60)[0] == "has it\n"
    with system.locked(tmp_path / "lock", refuse):  # the file has stayed, the lock has not
        pass


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("is_left", [False, True])
def test_nobody_waits_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_left: bool
) -> None:
    def flock(_: int, __: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    if is_left:  # by a process that was killed
        (tmp_path / "lock").write_text("123\nanother-host\n")
    with system.locked(tmp_path / "lock", refuse), system.locked(tmp_path / "lock", refuse):
        pass


def test_nobody_waits_for_a_lock_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(file: str, *_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", file)

    with system.locked(tmp_path / "missing/lock", refuse), monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with system.locked(tmp_path / "lock", refuse):
            pass
