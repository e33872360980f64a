"""Certificates for localhost, made by openssl."""

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Certificate(NamedTuple):
    """The files of a certificate and its key."""

    public: Path
    private: Path


def make_certificate(folder: Path) -> Certificate:
    """Write a new certificate of localhost and its key to a folder."""
    files = Certificate(folder / "certificate.pem", folder / "key.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    try:
        subprocess.run(
            [*command, "-out", str(files.public), "-keyout", str(files.private)],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed; it makes the certificate")
    return files
