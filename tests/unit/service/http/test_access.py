"""Who may send a request, in which turn it starts, and which connections are accepted."""

import asyncio
import hashlib
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from cloze.service.core import Overloaded
from cloze.service.http import acceptor as acceptor_module
from cloze.service.http import starts as starts_module
from cloze.service.http.acceptor import Acceptor
from cloze.service.http.access import AccessControl, accepted_hosts, is_accepted, is_loopback
from cloze.service.http.caller import Callers
from cloze.service.http.connection import DirectRoutes
from cloze.service.http.keys import Keys, Scope
from cloze.service.http.probes import Probes
from cloze.service.http.routes import BytesResponse
from cloze.service.http.starts import Starts

# ---- hosts -------------------------------------------------------------------------------------


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


# ---- keys and hosts of requests ----------------------------------------------------------------


async def reach(control: Any, method: str, path: str, **headers: str) -> str:
    """Return the body of the answer to a request."""
    scope = {
        "type": "http", "method": method, "path": path, "client": ("192.0.2.1", 1),
        "headers": [(n.encode(), v.encode()) for n, v in headers.items()],
    }  # fmt: skip
    bodies = []

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await control(scope, receive, send)
    return b"".join(bodies).decode()


async def application(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("passed")(scope, receive, send)


async def named(_: Request, error: Exception) -> Response:
    return PlainTextResponse(type(error).__name__)


def controlled(keys: Keys | None, hosts: frozenset[bytes] = frozenset()) -> AccessControl:
    scopes = (("/metrics", Scope.METRICS), ("/admin/", Scope.ADMIN))
    return AccessControl(
        application, Callers(keys=keys), frozenset({"/health"}), scopes, hosts, named
    )


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    text = ""
    for name in ("inference", "metrics", "admin"):
        digest = hashlib.sha256(name.encode()).hexdigest()
        text += f'[{name}]\nsha256 = "{digest}"\nscopes = ["{name}"]\n'
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
    ],
)
def test_a_request_needs_a_key_with_the_scope_of_its_path(
    keys: Keys, method: str, path: str, key: str | None, result: str
) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    assert asyncio.run(reach(controlled(keys), method, path, **headers)) == result


def test_without_keys_everybody_may_send_requests_to_an_accepted_host() -> None:
    open_to_all = controlled(None)
    assert asyncio.run(reach(open_to_all, "POST", "/admin/reload")) == "passed"
    assert asyncio.run(reach(open_to_all, "POST", "/embed", host="evil")) == "passed"
    local = controlled(None, frozenset({b"cloze"}))
    assert asyncio.run(reach(local, "POST", "/embed", host="cloze:80")) == "passed"
    assert asyncio.run(reach(local, "POST", "/embed", host="evil")) == "Forbidden"
    assert asyncio.run(reach(local, "GET", "/health", host="evil")) == "Forbidden"


def test_handlers_are_called_without_the_router() -> None:
    async def embed(_: Request) -> Response:
        return PlainTextResponse("direct")

    async def fails(_: Request) -> Response:
        raise Overloaded("full", 1)

    direct: Any = DirectRoutes(application, {"/embed": embed, "/fails": fails}, named)
    for method, path, result in (
        ("POST", "/embed", "direct"),
        ("GET", "/embed", "passed"),
        ("POST", "/other", "passed"),
        ("POST", "/fails", "Overloaded"),
    ):
        assert asyncio.run(reach(direct, method, path)) == result


def test_a_response_of_bytes_has_its_length() -> None:
    response = BytesResponse(b"12345", b"text/plain", (b"x-more", b"1"))
    assert response.status_code == 200
    assert response.raw_headers == [
        (b"content-length", b"5"), (b"content-type", b"text/plain"), (b"x-more", b"1"),
    ]  # fmt: skip
    assert BytesResponse(b"").raw_headers[1] == (b"content-type", b"application/json")


# ---- turns -------------------------------------------------------------------------------------


def test_four_requests_start_per_turn_and_clients_take_turns() -> None:
    started: list[str] = []

    async def run() -> list[int]:
        starts = Starts()
        results = [starts.start("a", lambda n=n: started.append(f"a{n}")) for n in range(9)]
        assert results == [True] * 4 + [False] * 5
        assert not starts.start("b", lambda: started.append("b0"))
        counts = [len(started)]
        while len(started) < 10:
            await asyncio.sleep(0)
            counts.append(len(started))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert starts.start("c", lambda: started.append("c0")), "nothing waits any more"
        return counts

    counts = asyncio.run(run())
    assert counts[0] == 4
    assert max(after - before for before, after in pairwise(counts)) <= 4
    assert started == ["a0", "a1", "a2", "a3", "a4", "b0", "a5", "a6", "a7", "a8", "c0"]


def test_the_wait_of_a_client_is_its_own_line_and_one_turn_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]

    async def run() -> None:
        starts = Starts()
        assert starts.expected_wait_s("a") == 0
        for client, count in (("a", 40), ("b", 1)):
            for _ in range(count):
                starts.start(client, lambda: None)
        assert starts.expected_wait_s("a") == 0, "no rate is measured yet"
        monkeypatch.setattr(starts_module.time, "monotonic", lambda: now[0])
        for _ in range(3):
            now[0] += 0.5
            starts._turn()
        rate = starts._rate.tokens_per_s
        assert rate == pytest.approx(8)
        waiting = starts._waiting
        assert starts._lines.keys() == {"a"}
        assert starts.expected_wait_s("new") == pytest.approx(min(waiting, 1 * 2) / rate)
        assert starts.expected_wait_s("a") == pytest.approx(waiting / rate)
        now[0] += 2.1
        assert starts.expected_wait_s("a") == 0, "the rate is old"

    asyncio.run(run())


# ---- connections -------------------------------------------------------------------------------


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


def accepting(probes: dict[bytes, Any], *requests: bytes) -> list[bytes]:
    """Return what clients receive that have sent requests before they are accepted."""

    async def run() -> list[bytes]:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            clients = [socket.create_connection(listener.getsockname()) for _ in requests]
            for client, request in zip(clients, requests, strict=True):
                client.sendall(request)
                client.setblocking(False)
            acceptor = Acceptor(listener, Greeter, None, Probes(probes, frozenset()))
            received = [await asyncio.wait_for(loop.sock_recv(c, 999), 20) for c in clients]
            acceptor.close()
            await acceptor.wait_closed()
            assert not acceptor.is_opening
            for client in clients:
                client.close()
            return received

    return asyncio.run(run())


def test_connections_are_accepted_and_probes_answered_at_once() -> None:
    probe = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    first, second, third = accepting({b"/health": lambda: b"up"}, b"x", probe, b"")
    assert (first, third) == (b"hello", b"hello")
    assert second.startswith(b"HTTP/1.1 200 OK")
    assert second.endswith(b"\r\n\r\nup")


def test_more_connections_than_one_turn_takes() -> None:
    assert acceptor_module._ACCEPTS_PER_TURN == 16
    assert accepting({}, *[b"x"] * 40) == [b"hello"] * 40


def test_a_closed_acceptor_accepts_nothing() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            acceptor = Acceptor(listener, Greeter, None, Probes({}, frozenset()))
            acceptor.close()
            acceptor._resume()
            with socket.create_connection(listener.getsockname()) as client:
                client.setblocking(False)
                await asyncio.sleep(0.05)
                with pytest.raises(BlockingIOError):
                    client.recv(1)

    asyncio.run(run())
