"""Who is taken for the client of a request that a proxy has passed on."""

from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from starlette.types import Scope

from cloze.service.http.record import Callers
from cloze.service.http.routes import CONNECTION
from tests.support.serving import running_server
from tests.support.waiting import wait_until

PROXY = "10.0.0.1"


def request(peer: str, name: str = "x-forwarded-for", client: str | None = None) -> Scope:
    """Return a request of a proxy, whose client uvicorn has replaced by another one, or not."""
    return {
        "method": "POST",
        "path": "/embed",
        "client": (client or peer, 4711),
        "headers": [(name.encode(), b"203.0.113.9")],
        "state": {CONNECTION: SimpleNamespace(address=peer)},
    }


def test_a_proxy_that_is_not_trusted_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    callers = Callers()
    callers.record(request(PROXY, "accept"), None)
    assert not caplog.messages
    for _ in range(3):
        assert callers.record(request(PROXY), None).client == PROXY
    [message] = caplog.messages
    assert message.startswith(f"{PROXY} forwards requests of others")
    assert "CLOZE_TRUSTED_PROXIES" in message
    assert "203.0.113.9" not in message
    for number in range(100):
        callers.record(request(f"198.51.100.{number}"), None)
    assert len(caplog.messages) == 8, "a client may pretend"


def test_the_last_address_that_no_proxy_has_is_the_client(tiny_store: Path) -> None:
    """Each proxy appends the address that it sees; a client may send any others before them."""
    trusted = "127.0.0.1/8, 10.0.0.2"
    with running_server(tiny_store, CLOZE_TRUSTED_PROXIES=trusted) as server:
        for forwarded, client in {
            "198.51.100.7, 203.0.113.9": "203.0.113.9",
            "198.51.100.7, 203.0.113.8, 10.0.0.2": "203.0.113.8",
            "x" * 70: "x" * 64,
        }.items():
            headers = {"X-Forwarded-For": forwarded}
            httpx.post(f"{server.url}/embed", json={"inputs": "walk"}, headers=headers)
            shown = f" client={client} "
            wait_until(lambda shown=shown: shown in "".join(server.log))  # type: ignore[misc]
