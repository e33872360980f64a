"""Clients that offer another protocol, and are answered in HTTP/1.1 as if they had not."""

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.serving import Server

pytestmark = pytest.mark.timeout(120)

BODY = b'{"inputs": "the king"}'


def embedded(server: Server) -> bytes:
    return httpx.post(f"{server.url}/embed", content=BODY).content


def test_curl_offers_http_2(server: Server, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    if "HTTP2" not in subprocess.run(["curl", "-V"], capture_output=True, text=True).stdout:
        pytest.skip("this curl lacks HTTP/2")
    (tmp_path / "small").write_bytes(BODY)
    (tmp_path / "large").write_bytes(BODY + b" " * 300_000)
    command, report = ["curl", "-sS"], "%{http_code} %{http_version} %{num_connects}\n"
    for name in ("small", "large", "small"):
        body = f"@{tmp_path / name}"
        command += ["--http2", "--data-binary", body, "-o", str(tmp_path / "answer")]
        command += ["-w", report, f"{server.url}/embed", "--next"]
    done = subprocess.run(command[:-1], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["200 1.1 1", "200 1.1 0", "200 1.1 0"], done.stderr
    assert (tmp_path / "answer").read_bytes() == embedded(server)
    done = subprocess.run(
        ["curl", "-sS", "--http2-prior-knowledge", server.url], capture_output=True, text=True
    )
    assert done.returncode, "it does not wait for ever"
