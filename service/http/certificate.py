"""The certificate of the connections, which is read again when its files change."""

import os
import ssl
from pathlib import Path

from cloze.service.errors import StartupError
from cloze.service.http.watched_files import WatchedFiles

_TLS_1_2_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""The cipher suites of TLS 1.2 with forward secrecy and authenticated encryption.

Source: RFC 9325, section 4.2. TLS 1.3 has no others.
"""


class Certificate:
    """The certificate that connections get by TLS.

    Args:
        certificate: PEM file of the certificate chain; None: no TLS.
        key: PEM file of the certificate's private key.

    Attributes:
        files: reads the certificate again; the old one stays if the new one cannot be used.
        context: for connections that open from now on; None: no TLS, or `files` were not read.
        end: when the certificate of `context` ends, as Unix time; None: there is none.
    """

    def __init__(self, certificate: Path | None, key: Path | None) -> None:
        self._certificate, self._key = certificate, key
        self.context: ssl.SSLContext | None = None
        self.end: float | None = None
        paths = [path for path in (certificate, key) if path is not None]
        self.files = WatchedFiles(paths, self._use, "certificate and key")

    def _use(self) -> None:
        """Use what the files hold now for the connections that open from now on."""
        self.context, self.end = self.load()

    def load(self) -> tuple[ssl.SSLContext | None, float | None]:
        """Return a new context with what the files hold now, and when the certificate ends.

        The files are read one after another, so another program may replace one in between. A
        context that is in use would be left with half of a pair whose files do not fit.

        Raises:
            StartupError: a file cannot be read, or the key is not the certificate's.
        """
        if self._certificate is None:
            return None, None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_ciphers(_TLS_1_2_CIPHERS)
        try:
            # Without a password, OpenSSL would ask for one at the terminal, and wait.
            context.load_cert_chain(self._certificate, self._key, password="")
            # No public function reads the end; `test_metrics.py` compares it with openssl.
            file = os.fspath(self._certificate)
            decoded = ssl._ssl._test_decode_cert(file)  # type: ignore[attr-defined]
            return context, float(ssl.cert_time_to_seconds(decoded["notAfter"]))
        except (OSError, ValueError) as error:  # an SSLError is both
            reason = getattr(error, "strerror", None) or error
            raise StartupError(
                f"the certificate {self._certificate} or its key cannot be used: {reason}"
            ) from None
