"""Who may send a request, and to which host."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from cloze.service.batching.admission import WaitLimits
from cloze.service.http.door import Door, Gate, StartQueue
from cloze.service.http.keys import Keys, Permission
from cloze.service.http.record import Access, Callers, accepted_hosts, is_accepted
from cloze.service.http.returns import Returns
from cloze.service.settings import is_loopback
from tests.support.records import recorded, scope_of

pytestmark = pytest.mark.anyio


def test_addresses_of_this_machine() -> None:
    for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "192.0.2.1", "example", ""):
        assert not is_loopback(host)


def test_hosts_that_are_accepted() -> None:
    local = {b"localhost", b"127.0.0.1", b"[::1]"}
    assert accepted_hosts("0.0.0.0", []) == frozenset()
    assert accepted_hosts("127.0.0.5", []) == local | {b"127.0.0.5"}
    assert accepted_hosts("::1", []) == local
    assert accepted_hosts("0.0.0.0", ["Cloze.Example"]) == local | {b"cloze.example"}
    hosts = frozenset({b"cloze", b"[::1]"})
    for value in (b"cloze", b" CLOZE:80 ", b"[::1]", b"[::1]:80"):
        assert is_accepted(value, hosts)
    for value in (b"other", b"cloze.evil", b"[::2]:80", b"::1", b""):
        assert not is_accepted(value, hosts)


async def reach(app: Door, method: str, path: str, keys: Keys | None = None, **headers: str) -> str:
    """Return the body of the answer to a request."""
    record = recorded(path, method=method, callers=Callers(keys=keys), **headers)
    bodies = []

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(scope_of(record), receive, send)
    return b"".join(bodies).decode()


async def application(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("passed")(scope, receive, send)


async def named(_: Request, error: Exception) -> Response:
    return PlainTextResponse(type(error).__name__)


GATE = Gate({}, WaitLimits(2.0), StartQueue(), Returns())
"""A gate of routes without models, which admits all."""

PERMISSIONS = (  # the first one counts
    ("/metrics/x", Permission.ADMIN), ("/metrics", Permission.METRICS),
    ("/admin/", Permission.ADMIN),
)  # fmt: skip


def controlled(
    hosts: frozenset[bytes] = frozenset(), *, needs_keys: bool = False,
    by_address: frozenset[str] = frozenset(),
) -> Door:  # fmt: skip
    access = Access(
        needs_keys=needs_keys,
        open_routes=frozenset({"/health"}),
        permissions=PERMISSIONS,
        hosts=hosts,
        by_address=by_address,
    )
    return Door(access, GATE, application, {}, named)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    text = ""
    for name in ("inference", "metrics", "admin"):
        digest = hashlib.sha256(name.encode()).hexdigest()
        text += f'[{name}]\nsha256 = "{digest}"\nscopes = ["{name}"]\nrequests_per_minute = 1\n'
    (tmp_path / "keys").write_text(text)
    return Keys(tmp_path / "keys")


@pytest.mark.parametrize(
    ("method", "path", "key", "result"),
    [
        ("POST", "/embed", "inference", "passed"),
        ("POST", "/embed", "metrics", "Forbidden"),
        ("POST", "/embed", "unknown", "Unauthorized"),
        ("POST", "/embed", None, "Unauthorized"),
        ("GET", "/metrics", "metrics", "passed"),
        ("GET", "/metrics", "inference", "Forbidden"),
        ("POST", "/admin/reload", "admin", "passed"),
        ("POST", "/admin/reload", "inference", "Forbidden"),
        ("GET", "/health", None, "passed"),
        ("HEAD", "/health", None, "passed"),
        ("POST", "/health", None, "Unauthorized"),
        ("GET", "/health/", None, "Unauthorized"),
        ("GET", "/metrics/x", "admin", "passed"),
        ("GET", "/metrics/x", "metrics", "Forbidden"),
        ("GET", "/x/metrics", "inference", "passed"),
    ],
)
async def test_a_request_needs_a_key_with_the_scope_of_its_path(
    keys: Keys, method: str, path: str, key: str | None, result: str
) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    guarded = controlled(needs_keys=True)
    assert await reach(guarded, method, path, keys, **headers) == result
    if result == "passed" and key:
        assert await reach(guarded, method, path, keys, **headers) == "RateLimited"
    elif result == "Forbidden":  # which is not counted
        assert await reach(guarded, method, path, keys, **headers) == "Forbidden"


async def test_without_keys_everybody_may_send_requests_to_an_accepted_host() -> None:
    open_to_all = controlled()
    assert await reach(open_to_all, "POST", "/admin/reload") == "passed"
    assert await reach(open_to_all, "POST", "/embed", host="evil") == "passed"
    local = controlled(frozenset({b"cloze"}))
    assert await reach(local, "POST", "/embed", host="cloze:80") == "passed"
    assert await reach(local, "POST", "/embed", host="evil") == "OtherHost"
    assert await reach(local, "GET", "/health", host="evil") == "OtherHost"


async def test_probes_are_answered_under_any_address_and_nothing_else_is() -> None:
    control = controlled(frozenset({b"cloze"}), by_address=frozenset({"/health"}))
    addresses = ["10.0.0.7", "10.0.0.7:8000", "[fd00::7]:8000", "[fd00::7]", " 10.0.0.7 "]
    for host in addresses:
        assert await reach(control, "GET", "/health", host=host) == "passed", host
        assert await reach(control, "POST", "/embed", host=host) == "OtherHost", host
    for host in ("evil.example", "10.0.0.7.evil.example", "10.0.0", "", "[", "fd00::7"):
        assert await reach(control, "GET", "/health", host=host) == "OtherHost", host
