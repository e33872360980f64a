"""Ports for servers that a test starts again, or that other programs must know beforehand."""

import random
import socket
from pathlib import Path

_FIRST_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port on which nobody listens, outside the range that the kernel hands out.

    A port of that range could become another process's own end of a connection before the server
    listens on it, or between two starts.
    """
    first = int(_FIRST_EPHEMERAL.read_text().split()[0]) if _FIRST_EPHEMERAL.exists() else 32768
    for port in random.SystemRandom().sample(range(first // 2, first), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port below {first}")
