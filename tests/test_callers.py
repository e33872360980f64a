"""Who is taken for the client of a request that a proxy has passed on."""

import pytest
from starlette.types import Scope

from cloze.service.http.record import Callers

PROXY, OTHER_PROXY = "10.0.0.1", "10.0.0.2"


def request(peer: str, *forwarded: str) -> Scope:
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    return {"method": "POST", "path": "/embed", "client": (peer, 4711), "headers": headers}


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        (PROXY, ["198.51.100.7, 203.0.113.9"], "203.0.113.9"),
        (PROXY, ["10.0.0.9, 203.0.113.9"], "203.0.113.9"),
        (PROXY, [f"198.51.100.7, 203.0.113.9, {OTHER_PROXY}"], "203.0.113.9"),
        (PROXY, ["198.51.100.7", "203.0.113.9"], "203.0.113.9"),
        (PROXY, [OTHER_PROXY], OTHER_PROXY),
        (PROXY, [], PROXY),
        ("203.0.113.9", ["198.51.100.7"], "203.0.113.9"),
    ],
    ids=["forged", "forged-as-near", "two-proxies", "two-headers", "all-trusted", "none", "direct"],
)
def test_the_last_address_that_no_proxy_has_is_the_client(
    peer: str, forwarded: list[str], client: str
) -> None:
    """Each proxy appends the address that it sees; a client may send any others before them."""
    callers = Callers([f"{PROXY}/32", OTHER_PROXY])
    assert callers.record(request(peer, *forwarded), None).client == client


def test_a_proxy_that_is_not_trusted_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    callers = Callers()
    callers.record(request(PROXY), None)
    assert not caplog.messages
    for _ in range(3):
        assert callers.record(request(PROXY, "203.0.113.9"), None).client == PROXY
    [message] = caplog.messages
    assert message.startswith(f"{PROXY} forwards requests of others")
    assert "CLOZE_TRUSTED_PROXIES" in message
    assert "203.0.113.9" not in message
    for number in range(100):
        callers.record(request(f"198.51.100.{number}", "203.0.113.9"), None)
    assert len(caplog.messages) == 8, "a client may pretend"


def test_a_trusted_proxy_is_told_of_if_it_names_no_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callers = Callers([PROXY])
    callers.record(request(PROXY, "203.0.113.9"), None)
    assert not caplog.messages
    scope = request(PROXY)
    scope["headers"].append((b"forwarded", b"for=203.0.113.9"))
    callers.record(scope, None)
    assert len(caplog.messages) == 1
