"""The certificate of a server, while another program replaces its files."""

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from cloze.service.errors import StartupError
from cloze.service.http.certificate import Certificate
from tests.support.certificates import make_certificate


@pytest.fixture
def renewed(tmp_path: Path) -> Path:
    """A folder with a new certificate and its key."""
    folder = tmp_path / "renewed"
    folder.mkdir()
    make_certificate(folder)
    return folder


def test_a_certificate_that_is_replaced_while_it_is_read(
    tmp_path: Path, renewed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key is a pipe, so the certificate is cut after its chain was read and before its end."""
    caplog.set_level("INFO", "cloze")
    public, private = make_certificate(tmp_path)
    certificate = Certificate(public, private)
    certificate.files.read()
    context, end = certificate.context, certificate.end
    assert context is not None
    assert end is not None
    key = private.read_text()
    private.unlink()
    os.mkfifo(private)

    def replace() -> None:
        with private.open("w") as pipe:  # as soon as the key is read
            public.write_text(public.read_text()[:500])
            pipe.write(key)

    replacing = threading.Thread(target=replace)
    replacing.start()
    certificate.files.look()
    replacing.join()
    assert (certificate.context, certificate.end) == (context, end)
    private.unlink()
    private.write_text(key)
    for _ in range(3):
        certificate.files.look()
    problems = [
        message for message in caplog.messages if "the old certificate and key stay" in message
    ]
    assert len(problems) == 2, "one of each problem"
    for file in renewed.iterdir():
        shutil.copy(file, tmp_path / file.name)
    certificate.files.look()
    assert certificate.context is not context
    assert certificate.files.problem == ""
    assert caplog.messages[len(problems) :] == ["read the certificate and key again"]


def test_a_key_with_a_password_is_refused_without_a_question(tmp_path: Path) -> None:
    """OpenSSL would ask for the password at the terminal, and the server would wait."""
    public, private = make_certificate(tmp_path)
    encrypt = ["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", str(private)]
    subprocess.run([*encrypt, "-out", str(tmp_path / "locked")], check=True, capture_output=True)
    with pytest.raises(StartupError, match="or its key cannot be used"):
        Certificate(public, tmp_path / "locked").load()
