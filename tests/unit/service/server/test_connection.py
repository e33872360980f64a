"""One connection: its bytes, its time limits, and what it counts for."""

import asyncio
import gc
import json
import logging
import socket
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from cloze.service.http.routes import CONNECTION, Connection
from cloze.service.server.acceptor import ConnectionTable
from cloze.service.server.connection import ServerProtocol
from cloze.service.settings import Settings

pytestmark = pytest.mark.anyio

LIMITS = Settings(header_timeout_ms=10_000, idle_timeout_ms=60_000, request_timeout_ms=30_000)

CLOSED = socket.socket()
CLOSED.close()


class Transport(asyncio.Transport):
    """A transport that keeps what is written, and that a test reads from as it likes."""

    def __init__(self, address: str = "192.0.2.1") -> None:
        super().__init__({"peername": (address, 5), "sockname": ("192.0.2.9", 80)})
        self.protocol: ServerProtocol
        self.writes: list[bytes] = []
        self.calls: list[str] = []
        self.unsent, self.closed_at = 0, -1.0
        self.socket: socket.socket | None = None  # so that uvicorn takes the addresses from above

    def write(self, data: Any) -> None:
        assert not self.is_closing(), "nothing is written to a closed connection"
        self.writes.append(bytes(data))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket if name == "socket" else super().get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def is_closing(self) -> bool:
        return self.closed_at >= 0

    def close(self) -> None:
        if self.closed_at < 0:
            self.calls.append("close")
            self.closed_at = asyncio.get_running_loop().time()
            if not self.unsent:
                asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.calls.append("abort")
        if self.closed_at < 0 or self.unsent:
            self.closed_at = asyncio.get_running_loop().time()
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    async def send(self, data: bytes) -> None:
        """Send bytes, and let the server handle them."""
        self.protocol.data_received(data)
        await settle()

    def lose(self) -> None:
        """Lose the client."""
        self.closed_at = asyncio.get_running_loop().time()
        self.protocol.connection_lost(ConnectionError())


class World:
    """A server's application, and the connections to it.

    `seen` and `bodies` have what reached the application, and `closed` the connections of which the
    service was told that they are closed. ``/hang`` answers when `release` is set.
    """

    def __init__(self, limits: Settings = LIMITS, most: int = 100) -> None:
        self.seen: list[Scope] = []
        self.bodies: list[bytes] = []
        self.release = asyncio.Event()
        self.closed: list[Connection] = []
        self.table = ConnectionTable(limits, most)
        self.config = uvicorn.Config(
            self._app, log_config=None, ws="none", interface="asgi3", proxy_headers=False
        )
        self.config.load()
        self.state = ServerState()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 200, with the body last; ``/full`` is refused before its body is read."""
        self.seen.append(scope)
        body, more, status = b"", scope["path"] != "/full", 200
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/full":
            status = 429
        else:
            self.bodies.append(body)
        if scope["path"] == "/hang":
            await self.release.wait()
        headers = [(b"content-length", b"2")]
        if b"expect" in dict(scope["headers"]) and status == 429:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if scope["path"] == "/begins":
            await self.release.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async def answer(self) -> None:
        """Let the requests that hang be answered."""
        self.release.set()
        await settle(60)

    def connect(self, address: str = "192.0.2.1") -> Transport:
        transport = Transport(address)
        transport.protocol = ServerProtocol(
            table=self.table, closed=self.closed.append, config=self.config,
            server_state=self.state, app_state={},
        )  # fmt: skip
        transport.protocol.connection_made(transport)
        transport.socket = CLOSED
        return transport


def connected(count: int = 1, **given: Any) -> tuple[Any, ...]:
    """Return a world, and connections to it."""
    world = World(**given)
    return world, *(world.connect() for _ in range(count))


async def settle(turns: int = 30) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def post(path: str = "/embed", body: bytes = b"1234", *headers: str, length: int = -1) -> bytes:
    size = len(body) if length < 0 else length
    lines = (f"POST {path} HTTP/1.1", "host: x", f"content-length: {size}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


GET = b"GET /embed?a=b HTTP/1.1\r\nhost: x\r\n\r\n"


def statuses(transport: Transport) -> list[int]:
    return [int(w.split()[1]) for w in transport.writes if w.startswith(b"HTTP/1.1")]


async def test_a_request_is_answered_in_one_write() -> None:
    world, transport = connected()
    await transport.send(post("/embed%41"))
    [answer] = transport.writes
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nok")
    assert world.bodies == [b"1234"]
    [scope] = world.seen
    assert scope["raw_path"] == b"/embed%41"
    assert scope["state"][CONNECTION] is transport.protocol
    assert scope["client"][0] == transport.protocol.address == "192.0.2.1"
    await transport.send(GET)
    assert statuses(transport) == [200, 200]
    assert world.seen[1]["path"] == "/embed"
    await transport.send(b"HEAD /embed HTTP/1.1\r\nhost: x\r\n\r\n")
    assert transport.writes[-1].endswith(b"\r\n\r\n")
    assert statuses(transport) == [200, 200, 200]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_every_method_may_have_a_body(method: str) -> None:
    world, transport = connected()
    odd = post("/a", INNER).replace(b"POST", method.encode(), 1)
    await transport.send(odd + post("/b", b"12"))
    assert world.bodies == [INNER, b"12"]
    assert statuses(transport) == [200, 200]


H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAA")
"""The offer of `java.net.http.HttpClient` and of ``curl --http2``."""

BAD_CHUNK = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabc"

OFFERS = {
    "h2c": H2C,
    "websocket": ("Upgrade: websocket", "Connection: keep-alive, Upgrade"),
    "nonsense": ("upgrade: x/1, , y", "connection: upgrade", "UPGRADE:"),
    "by proxy": ("upgrade: h2c", "proxy-connection: upgrade"),
}

INNER = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
"""A body that would be a request."""


def chunked(path: str, body: bytes, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", *headers, "transfer-encoding: chunked", "", "")
    parts = (b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:]))
    return "\r\n".join(lines).encode() + b"".join(parts) + b"0\r\nupgrade: h2c\r\n\r\n"


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
async def test_an_offer_of_another_protocol_is_ignored(offer: tuple[str, ...]) -> None:
    """However the bytes are divided: each body is its request's, and none becomes a request."""
    get = "\r\n".join(("GET /get HTTP/1.1", "host: x", *offer, "", "")).encode()
    pipeline = post("/a", INNER, *offer) + get + chunked("/b", INNER, *offer) + post("/c", INNER)
    expected = [("/a", INNER), ("/get", b""), ("/b", INNER), ("/c", INNER)]

    divided = [[pipeline[:at], pipeline[at:]] for at in range(len(pipeline))]
    for parts in (*divided, [pipeline[at : at + 1] for at in range(len(pipeline))]):
        world = World()
        transport = world.connect()
        for part in parts:
            transport.protocol.data_received(part)
        while len(statuses(transport)) < 4 and not transport.is_closing():
            await settle(1)
        await settle(1)
        paths = [scope["path"] for scope in world.seen]
        assert list(zip(paths, world.bodies, strict=True)) == expected
        assert statuses(transport) == [200] * 4


@pytest.mark.parametrize(
    ("version", "connection"), [("1.0", "upgrade, keep-alive"), ("1.1", "upgrade, close")]
)
async def test_an_offer_leaves_the_connection_as_it_would_be(version: str, connection: str) -> None:
    world, transport = connected()
    head = f"POST /embed HTTP/{version}\r\nconnection: {connection}\r\nupgrade: h2c\r\n"
    await transport.send(f"{head}content-length: {len(INNER)}\r\n\r\n".encode())
    transport.protocol.data_received(INNER + INNER)  # one more, after the last request
    await settle()
    assert world.bodies == [INNER]
    assert statuses(transport) == [200]
    assert transport.is_closing()
    asks = world.connect()
    await asks.send(post("/a", b"", *H2C, "expect: 100-continue", length=4))
    assert asks.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "unsupported_http_version"),
        (b"CONNECT h:443 HTTP/1.1\r\nhost: h:443\r\n\r\n" + INNER, 405, "method_not_allowed"),
        (b"\x16\x03\x01" + INNER, 400, "malformed_http"),
        (post("http://:x"), 400, "malformed_http"),
        (post("/a", b"12", "transfer-encoding: chunked", *H2C), 400, "malformed_http"),
        (BAD_CHUNK + INNER, 400, "malformed_http"),
    ],
)
async def test_what_is_no_request_is_refused(sent: bytes, status: int, code: str) -> None:
    for at in range(len(sent)):
        world = World()
        transport = world.connect()
        transport.protocol.data_received(sent[:at])
        transport.protocol.data_received(sent[at:])
        head, body = transport.writes[-1].split(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        assert f"\r\nx-error-code: {code}\r\n".encode() in head
        assert json.loads(body)["code"] == code
        assert b"\r\nconnection: close" in head
        assert transport.is_closing()
        await settle()
        assert [scope["path"] for scope in world.seen] in ([], ["/"])
        assert len(transport.writes) == 1


async def test_headers_have_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    _, transport = connected()
    for number in range(3):  # each request has its own 64 KiB
        transport.protocol.data_received(b"GET /embed HTTP/1.1\r\n")
        for _ in range(8):
            transport.protocol.data_received(b"x: " + b"a" * (8192 - 5) + b"\r\n")
        if number < 2:
            await transport.send(b"\r\n")
    assert statuses(transport) == [200, 200]
    transport.protocol.data_received(b"y")
    head, body = transport.writes[-1].split(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert set(lines[1:]) == {
        b"content-type: application/json", b"content-length: %d" % len(body),
        b"connection: close", b"x-error-code: headers_too_large",
    }  # fmt: skip
    told = json.loads(body)
    assert (told["error_type"], told["code"]) == ("Validation", "headers_too_large")
    assert transport.is_closing()
    assert "a request was refused: the request's headers have more than 65536" in caplog.text
    transport.protocol.data_received(b"z")


Reasons = Callable[[], list[str]]


@pytest.fixture
def reasons(caplog: pytest.LogCaptureFixture) -> Reasons:
    """Return the reasons for which connections were closed."""
    caplog.set_level(logging.DEBUG, "cloze")
    begin = "a connection was closed: "
    return lambda: [
        message.removeprefix(begin) for message in caplog.messages if message.startswith(begin)
    ]


async def test_the_time_without_a_request_begins_with_the_last_answer() -> None:
    world, transport = connected()
    await asyncio.sleep(50)
    transport.protocol.data_received(post("/hang")[:9])
    await asyncio.sleep(5)
    transport.protocol.data_received(post("/hang")[9:])
    await asyncio.sleep(500)
    assert not transport.is_closing(), "a request may take longer than a connection may be idle"
    world.release.set()
    await asyncio.sleep(61)
    assert statuses(transport) == [200]
    assert transport.closed_at == pytest.approx(615.0)


async def test_headers_must_arrive_in_time(reasons: Reasons) -> None:
    transport = World().connect()
    await asyncio.sleep(7)
    transport.protocol.data_received(GET[:9])
    await asyncio.sleep(3)
    transport.protocol.data_received(GET[9:12])
    await asyncio.sleep(20)
    assert transport.closed_at == pytest.approx(17.0)
    assert reasons() == ["the headers of its request did not arrive in time"]


async def test_a_connection_that_sends_headers_makes_room_for_a_new_one() -> None:
    world = World(most=1)
    begun = world.connect()
    begun.protocol.data_received(GET[:9])
    second = world.connect()
    assert begun.is_closing()
    await settle()
    await second.send(post("/hang") + GET[:9])
    assert world.connect().is_closing(), "its request runs"
    await settle()
    await world.answer()
    assert not world.connect().is_closing()
    assert second.is_closing()


async def test_a_connection_without_a_request_ends_whatever_else_it_sends(reasons: Reasons) -> None:
    silent, fresh, used = World().connect(), World().connect(), World().connect()
    used.protocol.data_received(GET)
    for _ in range(7):
        await asyncio.sleep(9)
        for transport in (fresh, used):
            if not transport.is_closing():
                transport.protocol.data_received(b"\r\n")
    assert silent.closed_at == fresh.closed_at == used.closed_at == pytest.approx(60.0)
    assert silent.calls == ["close"]
    assert reasons() == ["it sent no request in time"] * 3


async def test_a_body_that_ends_after_its_answer_leaves_the_connection_idle() -> None:
    whole, dribbling = World().connect(), World().connect()
    for transport in (whole, dribbling):
        await transport.send(post("/full", b"12", length=4000))
        assert statuses(transport) == [429]
    await asyncio.sleep(5)
    whole.protocol.data_received(bytes(3998))
    for _ in range(11):
        dribbling.protocol.data_received(b"1")
        await asyncio.sleep(5)
    await asyncio.sleep(100)
    assert whole.closed_at == pytest.approx(60.0)
    assert dribbling.closed_at == pytest.approx(60.0), "the rest of its body is no request"


async def test_a_client_that_reads_nothing_of_an_answer_is_closed(reasons: Reasons) -> None:
    world = World()
    last = world.connect()
    last.unsent = 5_000
    last.protocol.data_received(post("/embed", b"1234", "connection: close"))
    transport = world.connect()
    transport.protocol.pause_writing()
    transport.unsent = 70_000
    transport.protocol.data_received(post() + post())
    await asyncio.sleep(31)
    assert transport.closed_at == pytest.approx(30.0)
    assert transport.calls[-1] == last.calls[-1] == "abort"
    assert reasons() == ["it does not read its answer"] * 2
    await settle()
    assert {*world.closed} == {transport.protocol, last.protocol}
    assert transport.writes == []
    assert not world.state.tasks, "nothing waits for it any more"


async def test_a_client_that_reads_a_part_in_time_goes_on(reasons: Reasons) -> None:
    transport = World().connect()
    for _ in range(5):
        transport.protocol.pause_writing()
        await asyncio.sleep(11)
        transport.protocol.resume_writing()
    await asyncio.sleep(4)
    await transport.send(post())
    assert statuses(transport) == [200]
    await asyncio.sleep(59)
    assert reasons() == []


async def test_the_body_of_a_refused_request_is_discarded_and_the_next_one_answered() -> None:
    world, transport = connected()
    large = 300_000
    await transport.send(post("/full", b"12", length=large))
    assert statuses(transport) == [429], "before its body has arrived"
    for _ in range(29):
        transport.protocol.data_received(bytes(10_000))
    transport.protocol.data_received(INNER + bytes(10_000 - 2 - len(INNER)) + post())
    await settle(200)
    assert statuses(transport) == [429, 200]
    assert world.bodies == [b"1234"]
    await transport.send(post("/full"))
    assert statuses(transport) == [429, 200, 429]


@pytest.mark.parametrize(
    "request_bytes",
    [
        post("/full", b"1234", "connection: close"),
        post("/full", b"1234", "connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0", 1),
        post("/full", b"1234", "expect: 100-continue"),
    ],
)
async def test_a_refusal_ends_connections_that_are_for_one_request(request_bytes: bytes) -> None:
    transport = World().connect()
    await transport.send(request_bytes)
    [answer] = transport.writes
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert answer.count(b"\r\nconnection: close\r\n") == 1
    assert transport.is_closing()


async def test_requests_of_a_pipeline_are_answered_in_their_turn() -> None:
    world, transport = connected()
    await transport.send(post("/hang") + post("/full") + post() + post("/full"))
    assert transport.writes == []
    assert [scope["path"] for scope in world.seen] == ["/hang"]
    await world.answer()
    assert statuses(transport) == [200, 429, 200, 429]
    assert [scope["path"] for scope in world.seen] == ["/hang", "/full", "/embed", "/full"]
    world.release.clear()
    transport.writes.clear()
    await transport.send(post("/begins") + post("/embed") + GET)
    assert transport.writes == [], "a head waits for its body"
    await world.answer()
    assert [write.count(b"HTTP/1.1 200 OK") for write in transport.writes] == [1, 1, 1]
    assert all(write.endswith(b"\r\n\r\nok") for write in transport.writes)
    await asyncio.sleep(61)
    assert transport.closed_at == pytest.approx(60.0)


async def test_the_oldest_idle_connection_makes_room(reasons: Reasons) -> None:
    world, first, second, busy = connected(3, most=3)
    busy.protocol.data_received(post("/hang"))
    await first.send(GET)
    fourth = world.connect()
    assert (first.is_closing(), second.is_closing()) == (False, True), "it is idle for longest"
    assert reasons() == ["it made room for a new one"]
    await settle()
    assert world.table.closed_count == 1
    fifth = world.connect()
    assert first.is_closing()
    assert not fourth.is_closing()
    assert not fifth.is_closing()


async def test_without_an_idle_connection_a_new_one_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(most=2)
    busy = [world.connect(), world.connect()]
    for transport in busy:
        await transport.send(post("/hang"))
    refused = world.connect()
    [answer] = refused.writes
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nretry-after: 1\r\n" in answer
    assert refused.is_closing()
    assert "a connection was refused: the server has 2 connections, the most" in caplog.text
    await settle()
    await world.answer()
    assert [statuses(transport) for transport in busy] == [[200], [200]]
    again = world.connect()
    assert not again.is_closing()
    assert busy[0].is_closing(), "it is idle since its answer"
    assert not busy[1].is_closing()


async def test_an_address_has_a_limit() -> None:
    world = World(LIMITS.model_copy(update={"max_connections_per_address": 2}))
    own = [world.connect(), world.connect()]
    assert not any(one.is_closing() for one in own)
    assert world.connect().writes[0].startswith(b"HTTP/1.1 503 ")
    assert not world.connect("192.0.2.2").is_closing()
    await settle()
    assert world.connect().is_closing()
    await settle()
    own[0].close()
    await settle()
    assert not world.connect().is_closing()
    own[1].close()
    await settle()
    assert world.table._by_address == {"192.0.2.1": 1, "192.0.2.2": 1}
    assert world.table._open == 2


async def test_a_lost_connection_leaves_nothing(reasons: Reasons) -> None:
    world, hanging, answered, quiet = connected(3)
    hanging.protocol.data_received(post("/hang"))
    await answered.send(GET)
    for transport in (hanging, answered, quiet):
        transport.protocol.pause_writing()
        transport.lose()
        transport.protocol.on_response_complete()
    assert (world.table._open, world.table.closed_count) == (0, 3)
    assert not world.table.idle
    assert not world.table._by_address, "else it grows by each address"
    await asyncio.sleep(120)
    assert reasons() == [], "their timers have ended"


@pytest.mark.parametrize("path", ["/hang", "/begins"])
@pytest.mark.parametrize("behind", [b"", post(), GET[:9]], ids=["alone", "whole", "part"])
async def test_a_client_that_leaves_is_told_to_its_request(
    path: str, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever else it has sent, and whatever the request answers then."""
    world, calls = World(), list[str]()
    transport = world.connect()
    await transport.send(post(path) + behind)
    transport.protocol.on_lost = lambda: calls.append(str(transport.protocol.is_lost))
    transport.lose()
    assert calls == ["True"]
    await world.answer()
    assert transport.writes == []
    assert len(world.seen) == 1, "those behind it are not started"
    assert not world.state.tasks
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_closed_connection_is_freed_when_its_cycles_are_collected() -> None:
    world, transport = connected()
    await transport.send(post() + post("/hang") + post())
    transport.lose()
    await world.answer()
    world.closed.clear()
    world.seen.clear()
    freed = weakref.ref(transport.protocol)
    del transport
    gc.collect()
    assert freed() is None


async def test_a_drain_ends_idle_connections_and_those_that_open_late() -> None:
    world, idle, hanging = connected(2)
    await hanging.send(post("/hang"))
    world.table.is_draining = True
    for transport in (idle, hanging):
        transport.protocol.shutdown()
    late = world.connect()
    assert (idle.is_closing(), hanging.is_closing(), late.is_closing()) == (True, False, True)
    await asyncio.sleep(100)
    assert not hanging.is_closing(), "the drain limits the time of bodies only"
    await world.answer()
    assert statuses(hanging) == [200]
    assert b"connection: close" in hanging.writes[0]
    assert hanging.is_closing()


async def test_a_drain_waits_five_seconds_for_a_body(reasons: Reasons) -> None:
    _, half, whole = connected(2)
    for transport in (half, whole):
        transport.protocol.data_received(post("/hang", b"12", length=4))
    await asyncio.sleep(2)
    for transport in (half, whole):
        transport.protocol.shutdown()
    await asyncio.sleep(4)
    whole.protocol.data_received(b"34")
    await asyncio.sleep(60)
    assert half.closed_at == pytest.approx(7.0)
    assert reasons() == ["its body did not arrive during the drain"]
    assert not whole.is_closing()
