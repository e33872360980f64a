"""Who may send a request, and which connections are accepted."""

import asyncio
import contextlib
import errno
import hashlib
import socket
import ssl
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
from cloze.service.server import acceptor as acceptor_module
from cloze.service.server.acceptor import Acceptor, Probes
from cloze.service.settings import is_loopback
from tests.support.records import recorded, scope_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Return a loop for which time passes: sockets are real here."""
    return "asyncio"


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
def test_a_request_needs_a_key_with_the_scope_of_its_path(
    keys: Keys, method: str, path: str, key: str | None, result: str
) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    guarded = controlled(needs_keys=True)
    assert asyncio.run(reach(guarded, method, path, keys, **headers)) == result
    if result == "passed" and key:
        assert asyncio.run(reach(guarded, method, path, keys, **headers)) == "RateLimited"
    elif result == "Forbidden":  # which is not counted
        assert asyncio.run(reach(guarded, method, path, keys, **headers)) == "Forbidden"


def test_without_keys_everybody_may_send_requests_to_an_accepted_host() -> None:
    open_to_all = controlled()
    assert asyncio.run(reach(open_to_all, "POST", "/admin/reload")) == "passed"
    assert asyncio.run(reach(open_to_all, "POST", "/embed", host="evil")) == "passed"
    local = controlled(frozenset({b"cloze"}))
    assert asyncio.run(reach(local, "POST", "/embed", host="cloze:80")) == "passed"
    assert asyncio.run(reach(local, "POST", "/embed", host="evil")) == "OtherHost"
    assert asyncio.run(reach(local, "GET", "/health", host="evil")) == "OtherHost"


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
            acceptor = Acceptor(listener, Greeter, lambda: None, Probes(probes, frozenset()))
            acceptor.begin()
            received = [await asyncio.wait_for(loop.sock_recv(c, 999), 20) for c in clients]
            acceptor.close()
            await acceptor.wait_closed()
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
    assert accepting({}, *[b"x"] * 40) == [b"hello"] * 40


async def test_an_acceptor_accepts_from_its_begin_until_it_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = Acceptor(listener, Greeter, lambda: None, Probes({}, frozenset()))
        with socket.create_connection(listener.getsockname()) as client:
            client.setblocking(False)
            await asyncio.sleep(0.05)
            with pytest.raises(BlockingIOError):
                client.recv(1)
            acceptor.begin()
            loop = asyncio.get_running_loop()
            assert await asyncio.wait_for(loop.sock_recv(client, 9), 20) == b"hello"
        acceptor.close()
        acceptor.begin()
        with socket.create_connection(listener.getsockname()) as client:
            client.setblocking(False)
            await asyncio.sleep(0.05)
            with pytest.raises(BlockingIOError):
                client.recv(1)
        await acceptor.wait_closed()


class FullOnce(socket.socket):
    """A listening socket of a process that has run out of files once."""

    number = errno.EMFILE
    failed = 0

    def accept(self) -> Any:
        if not self.failed:
            self.failed = 1
            raise OSError(self.number, "Too many open files")
        return super().accept()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
async def test_a_process_without_files_accepts_again_after_a_pause(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor_module, "_PAUSE_S", 0.01)
    monkeypatch.setattr(FullOnce, "number", number)

    loop = asyncio.get_running_loop()
    with FullOnce() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        acceptor = Acceptor(listener, Greeter, lambda: None, Probes({}, frozenset()))
        acceptor.begin()
        with socket.create_connection(listener.getsockname()) as client:
            client.setblocking(False)
            assert await asyncio.wait_for(loop.sock_recv(client, 9), 20) == b"hello"
        acceptor.close()
        await acceptor.wait_closed()
    assert caplog.messages == ["connections wait: Too many open files"]


async def test_connections_of_clients_that_have_gone_are_closed() -> None:
    """A client that speaks no TLS, and one that is gone before its handshake."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        probe = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        plain = socket.create_connection(listener.getsockname())
        plain.sendall(probe)
        gone = socket.create_connection(listener.getsockname())
        gone.close()
        acceptor = Acceptor(
            listener, Greeter, lambda: context, Probes({b"/health": lambda: b"up"}, frozenset())
        )
        acceptor.begin()
        plain.setblocking(False)
        loop = asyncio.get_running_loop()
        received = b""
        with contextlib.suppress(ConnectionError):
            received = await asyncio.wait_for(loop.sock_recv(plain, 999), 20)
        assert not received.startswith(b"HTTP"), "with TLS, nobody answers in plain text"
        acceptor.close()
        await acceptor.wait_closed()
        plain.close()


def test_probes_are_answered_under_any_address_and_nothing_else_is() -> None:
    control = controlled(frozenset({b"cloze"}), by_address=frozenset({"/health"}))
    addresses = ["10.0.0.7", "10.0.0.7:8000", "[fd00::7]:8000", "[fd00::7]", " 10.0.0.7 "]
    for host in addresses:
        assert asyncio.run(reach(control, "GET", "/health", host=host)) == "passed", host
        assert asyncio.run(reach(control, "POST", "/embed", host=host)) == "OtherHost", host
    for host in ("evil.example", "10.0.0.7.evil.example", "10.0.0", "", "[", "fd00::7"):
        assert asyncio.run(reach(control, "GET", "/health", host=host)) == "OtherHost", host
