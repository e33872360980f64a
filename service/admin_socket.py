"""The Unix socket on which a server without API keys can be asked to reload.

The file system decides who reaches the socket. A TCP address cannot: a proxy on the same machine
connects from loopback for clients elsewhere.
"""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloze.service.core import StartupError

_BACKLOG = 16

_OWNER_ONLY = stat.S_IRUSR | stat.S_IWUSR


@contextmanager
def listening_on_admin_socket(path: Path | None) -> Iterator[list[socket.socket]]:
    """Return a Unix socket that listens, and remove it at the end.

    Args:
        path: where the socket is, for its owner only; None: the list is empty.

    Raises:
        StartupError: the socket cannot be made, or another process listens there.
    """
    if path is None:
        yield []
        return
    with socket.socket(socket.AF_UNIX) as listener:
        # Before the socket has a path, so that nobody can connect in between.
        os.fchmod(listener.fileno(), _OWNER_ONLY)
        try:
            _remove_unused(path)
            listener.bind(os.fspath(path))
            listener.listen(_BACKLOG)
        except OSError as error:
            raise StartupError(f"cannot listen on {path}: {error.strerror or error}") from None
        try:
            yield [listener]
        finally:
            path.unlink(missing_ok=True)


def _remove_unused(path: Path) -> None:
    """Remove a socket on which nobody listens, as of a server that was killed."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
