"""The sockets on which a server listens."""

import logging
import socket

from cloze.service.errors import StartupError
from cloze.service.observe.logs import announce
from cloze.service.settings import Settings, is_loopback

log = logging.getLogger("cloze")

BACKLOG = 2048
"""Length of the operating system's queue of connections that are not yet accepted."""


def bind(settings: Settings) -> socket.socket:
    """Bind the address and return the socket; call `listen` to accept connections.

    Binding before models are loaded makes a start on a used port fail at once.

    Raises:
        StartupError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    # With SO_REUSEADDR, Windows would let another server take the port.
    option = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
    listener.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(settings, error) from error
    return listener


def check_port(settings: Settings) -> None:
    """Check that the address can be bound, before the work of a start.

    Raises:
        StartupError: the address cannot be bound.
    """
    bind(settings).close()


def listen(listener: socket.socket, settings: Settings) -> None:
    """Start to accept connections, and log the address.

    Raises:
        StartupError: another program listens on the address, or the log cannot be written.
    """
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(settings, error) from error
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.tls_certificate else "http"
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    announce(f"listening on {address}")
    if not (is_loopback(settings.host) or settings.keys_file or settings.allow_anonymous):
        log.warning(
            "others reach this address, and no key is needed: set CLOZE_KEYS_FILE, or "
            "CLOZE_ALLOW_ANONYMOUS=1 if that is intended"
        )
    log.info("a page to try it: %s/, documentation: %s/docs", address, address)
    log.info("metrics: %s/metrics", address)


def _cannot_listen(settings: Settings, error: OSError) -> StartupError:
    return StartupError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}")
