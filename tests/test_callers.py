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
