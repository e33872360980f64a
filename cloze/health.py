"""The images' health check, ``python -m cloze.health``: asks the server that variables configure.

It runs every ten seconds, so it imports little: neither the settings' class nor the command line.
"""

import http.client
import os
import ssl
import sys

_TIMEOUT_S = 4.0

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Any address of this machine -> the address to ask."""


def main() -> int:
    """Return 0 if the server admits requests, else print why not and return 1."""
    host = os.environ.get("CLOZE_HOST", "127.0.0.1")
    host, port = _LOOPBACK.get(host, host), int(os.environ.get("CLOZE_PORT", "8000"))
    if "CLOZE_TLS_CERTIFICATE" in os.environ:
        # The certificate names the host by which clients reach it, and not this address.
        unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=_TIMEOUT_S, context=unverified
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/readyz", headers={"connection": "close"})
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"{host}:{port} does not answer: {error}\n")
        return 1
    if status != http.client.OK:
        sys.stderr.write(f"{host}:{port} is not ready: status {status}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
