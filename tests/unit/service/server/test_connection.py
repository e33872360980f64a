"""One connection: its bytes, its time limits, its refusals, and what it counts for."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from cloze.service.batching.fair_queue import LineKey
from cloze.service.http.gate import Refusal, Starts
from cloze.service.http.memory_limit import Reader, UnreadAnswers
from cloze.service.http.record import RECORD, Callers, RequestRecord
from cloze.service.http.returns import Returns
from cloze.service.server.acceptor import ConnectionLimits, ConnectionTable
from cloze.service.server.connection import MAX_HEADER_BYTES, ServerProtocol
from tests.leaping_loop import run_leaping

LIMITS = ConnectionLimits(header_timeout_s=10.0, idle_timeout_s=60.0, max_connections=100)
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\nno"

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
        self._close("close")

    def abort(self) -> None:
        self._close("abort")

    def _close(self, how: str) -> None:
        if self.closed_at < 0:
            self.calls.append(how)
            loop = asyncio.get_running_loop()
            self.closed_at = loop.time()
            loop.call_soon(self.protocol.connection_lost, None)


class World:
    """A server's application, and the connections to it.

    Attributes:
        refuses: whether the gate refuses a request.
        made: number of the records that were made.
        seen: the scopes of the requests that have reached the application.
        started: the times at which they reached it.
        release: an event; ``/hang`` answers when it is set.
    """

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.refuses: Callable[[RequestRecord], bool] = lambda _: False
        self.hold_s = 0.0
        self.returns = Returns()
        self.asked: list[str] = []
        self.made = 0
        self.seen: list[Scope] = []
        self.started: list[float] = []
        self.bodies: list[bytes] = []
        self.release = asyncio.Event()
        self.table, self.answers, self.starts = (
            ConnectionTable(limits),
            UnreadAnswers(10**6),
            Starts(),
        )
        self.config = uvicorn.Config(
            self._app, log_config=None, ws="none", interface="asgi3", proxy_headers=False
        )
        self.config.load()
        self.state = ServerState()

    def _admit(self, scope: Scope, connection: Reader) -> Refusal | None:
        self.made += 1
        request = scope[RECORD] = Callers().record(scope, scope["path"])
        request.connection = connection
        if request.method != "POST":
            return None
        self.asked.append(request.path)
        if self.refuses(request):
            return Refusal(REFUSAL, self.hold_s)
        request.unstarted = LineKey(0, 0), 1
        return None

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope)
        self.started.append(time.monotonic())
        body, more = b"", scope["path"] != "/unread"
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        if scope["path"] == "/hang":
            await self.release.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    def connect(self, address: str = "192.0.2.1") -> Transport:
        transport = Transport(address)
        transport.protocol = ServerProtocol(
            admit=self._admit, table=self.table, answers=self.answers, starts=self.starts,
            returns=self.returns, config=self.config, server_state=self.state, app_state={},
        )  # fmt: skip
        transport.protocol.connection_made(transport)
        transport.socket = CLOSED
        return transport


def play(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_leaping(test())


async def settle(turns: int = 30) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def now() -> float:
    return asyncio.get_running_loop().time()


def post(path: str = "/embed", body: bytes = b"1234", *headers: str, length: int = -1) -> bytes:
    size = len(body) if length < 0 else length
    lines = (f"POST {path} HTTP/1.1", "host: x", f"content-length: {size}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


GET = b"GET /embed?a=b HTTP/1.1\r\nhost: x\r\n\r\n"


def statuses(transport: Transport) -> list[int]:
    return [int(w.split()[1]) for w in transport.writes if w.startswith(b"HTTP/1.1")]


# ---- requests ----------------------------------------------------------------------------------


def test_a_request_is_answered_in_one_write() -> None:
    async def run() -> None:
        world = World()
        transport = world.connect()
        transport.protocol.data_received(post("/embed%41"))
        await settle()
        [answer] = transport.writes
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"\r\n\r\nok")
        assert world.bodies == [b"1234"]
        assert world.asked == ["/embed%41"], "a path is never decoded"
        [scope] = world.seen
        assert (scope["path"], scope[RECORD].connection) == ("/embed%41", transport.protocol)
        assert scope["client"][0] == transport.protocol.address == "192.0.2.1"
        transport.protocol.data_received(GET)
        await settle()
        assert statuses(transport) == [200, 200]
        assert world.asked == ["/embed%41"], "the gate is for POST"
        assert world.seen[1]["path"] == "/embed"
        head = b"HEAD /embed HTTP/1.1\r\nhost: x\r\n\r\n"
        transport.protocol.data_received(head)
        await settle()
        assert transport.writes[-1].endswith(b"\r\n\r\n")
        assert statuses(transport) == [200, 200, 200]
        assert world.made == 3, "one record per request"

    play(run)


@pytest.mark.parametrize(
    ("target", "path"), [("/embed?x=/y", "/embed"), ("http://host/embed%41#z", "/embed%41")]
)
def test_paths_of_targets(target: str, path: str) -> None:
    async def run() -> None:
        world = World()
        transport = world.connect()
        transport.protocol.data_received(post(target))
        await settle()
        assert world.asked == [scope["path"] for scope in world.seen] == [path]
        transport.protocol.data_received(post("http://:x"))
        assert statuses(transport)[1:] == [400]
        assert transport.is_closing()

    play(run)


# ---- offers of another protocol ------------------------------------------------------------------

H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAA")
"""The offer of `java.net.http.HttpClient` and of ``curl --http2``."""

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
def test_an_offer_of_another_protocol_is_ignored(offer: tuple[str, ...]) -> None:
    """However the bytes are divided: each body is its request's, and none becomes a request."""
    get = "\r\n".join(("GET /get HTTP/1.1", "host: x", *offer, "", "")).encode()
    pipeline = post("/a", INNER, *offer) + get + chunked("/b", INNER, *offer) + post("/c", INNER)
    expected = [("/a", INNER), ("/get", b""), ("/b", INNER), ("/c", INNER)]

    async def run() -> None:
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
            assert world.made == 4

    play(run)


@pytest.mark.parametrize(
    ("version", "connection"),
    [("1.0", "upgrade"), ("1.0", "upgrade, keep-alive"), ("1.1", "upgrade, close")],
)
def test_an_offer_leaves_the_connection_as_it_would_be(version: str, connection: str) -> None:
    async def run() -> None:
        world = World()
        transport = world.connect()
        head = f"POST /embed HTTP/{version}\r\nconnection: {connection}\r\nupgrade: h2c\r\n"
        transport.protocol.data_received(f"{head}content-length: {len(INNER)}\r\n\r\n".encode())
        await settle()
        transport.protocol.data_received(INNER + INNER)  # one more, after the last request
        await settle()
        assert world.bodies == [INNER]
        assert statuses(transport) == [200]
        assert transport.is_closing()

    play(run)


def test_an_offer_is_refused_as_any_request() -> None:
    async def run() -> None:
        world = World()
        world.refuses = lambda request: request.path == "/full"
        transport = world.connect()
        transport.protocol.data_received(post("/full", INNER, *H2C) + post("/a", b"12", *H2C))
        await settle()
        assert statuses(transport) == [429, 200]
        assert world.asked == ["/full", "/a"]
        waiting = post("/full", b"", *H2C, "expect: 100-continue", length=4)
        transport.protocol.data_received(waiting)
        assert statuses(transport) == [429, 200, 429]
        assert transport.is_closing(), "its body may come or not"
        asks = world.connect()
        asks.protocol.data_received(post("/a", b"", *H2C, "expect: 100-continue", length=4))
        await settle()
        assert asks.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]

    play(run)


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "the server speaks HTTP/1.1 only, not HTTP/2"),
        (
            b"CONNECT h:443 HTTP/1.1\r\nhost: h:443\r\n\r\n" + INNER,
            405,
            "the server is no proxy: it does not answer CONNECT",
        ),
        (
            b"\x16\x03\x01" + INNER,
            400,
            "the request is not HTTP/1.1: Invalid method encountered",
        ),
        (post("http://:x"), 400, "the request is not HTTP/1.1: its target is not a URL"),
        (
            post("/a", b"12", "transfer-encoding: chunked", *H2C),
            400,
            "the request is not HTTP/1.1: Transfer-Encoding can't be present with Content-Length",
        ),
        (
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabc" + INNER,
            400,
            "the request is not HTTP/1.1: Expected LF after chunk data",
        ),
    ],
)
def test_what_is_no_request_is_refused_and_closes(sent: bytes, status: int, message: str) -> None:
    async def run() -> None:
        for at in range(len(sent)):
            world = World()
            transport = world.connect()
            transport.protocol.data_received(sent[:at])
            transport.protocol.data_received(sent[at:])
            head, body = transport.writes[-1].split(b"\r\n\r\n")
            assert int(head.split()[1]) == status
            assert json.loads(body) == {"error": message, "error_type": "Validation"}
            assert b"\r\nconnection: close" in head
            assert transport.is_closing()
            await settle()
            assert [scope["path"] for scope in world.seen] in ([], ["/"])
            assert len(transport.writes) == 1

    play(run)


def test_received_bytes_are_parsed_in_slices() -> None:
    async def run() -> None:
        world = World()
        transport = world.connect()
        head = post(body=b"", length=20_000)
        transport.protocol.data_received(head + bytes(20_000 - 2))
        assert transport.calls == ["pause"], "one slice per turn of the loop"
        transport.protocol.data_received(b"12")
        await settle()
        assert transport.calls.count("resume") >= 1
        assert transport.calls[-1] == "resume"
        assert world.bodies == [bytes(20_000 - 2) + b"12"], "in their order"
        transport.calls.clear()
        transport.protocol.data_received(GET)
        assert "pause" not in transport.calls

    play(run)


def test_a_large_body_pauses_reading_until_it_is_taken() -> None:
    async def run() -> None:
        world = World()
        transport = world.connect()
        transport.protocol.data_received(post(body=b"", length=200_000))
        for _ in range(20):
            transport.protocol.data_received(bytes(10_000))
        await settle(100)
        assert world.bodies == [bytes(200_000)]
        assert transport.calls[-1] == "resume"

    play(run)


def test_headers_of_two_requests_count_apart() -> None:
    async def run() -> None:
        world = World()
        transport = world.connect()
        for _ in range(3):
            transport.protocol.data_received(b"GET /embed HTTP/1.1\r\n")
            for _ in range(8):
                transport.protocol.data_received(b"x: " + b"a" * (8192 - 5) + b"\r\n")
            transport.protocol.data_received(b"\r\n")
            await settle()
        assert statuses(transport) == [200] * 3, "64 KiB of headers are allowed"

    play(run)


def test_headers_have_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    assert MAX_HEADER_BYTES == 65_536

    async def run() -> None:
        world = World()
        transport = world.connect()
        transport.protocol.data_received(b"GET /embed HTTP/1.1\r\n")
        for _ in range(8):
            transport.protocol.data_received(b"x: " + b"a" * (8192 - 5) + b"\r\n")
        assert transport.writes == []
        transport.protocol.data_received(b"y")
        [answer] = transport.writes
        head, body = answer.split(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert lines[0] == b"HTTP/1.1 431 Request Header Fields Too Large"
        assert set(lines[1:]) == {
            b"content-type: application/json", b"content-length: %d" % len(body),
            b"connection: close",
        }  # fmt: skip
        message = "the request's headers have more than 65536 bytes, the limit"
        assert json.loads(body) == {"error": message, "error_type": "Validation"}
        assert transport.is_closing()
        assert f"a request was refused: {message}" in caplog.text
        transport.protocol.data_received(b"z")

    play(run)


def test_four_requests_start_per_turn_and_all_say_when_they_arrived() -> None:
    async def run() -> None:
        world = World()
        transports = [world.connect() for _ in range(6)]
        for transport in transports:
            transport.protocol.data_received(post())
        await settle(1)
        assert len(world.seen) == 4
        await settle()
        assert len(world.seen) == 6
        assert all(scope[RECORD].arrived < world.started[0] for scope in world.seen)
        assert all(statuses(transport) == [200] for transport in transports)

    play(run)


@pytest.mark.parametrize("behind", [b"", post(), GET[:9]], ids=["alone", "whole", "part"])
def test_a_request_whose_client_has_gone_is_not_started(behind: bytes) -> None:
    """Whatever else its client has sent in the meantime."""

    async def run() -> None:
        world = World()
        transports = [world.connect() for _ in range(5)]
        for transport in transports:
            transport.protocol.data_received(post())
        scope: Any = transports[4].protocol.scope
        assert scope[RECORD].unstarted is not None
        transports[4].protocol.data_received(behind)
        transports[4].protocol.connection_lost(ConnectionError())
        await settle()
        assert len(world.seen) == 4
        assert scope[RECORD].unstarted is None, "the gate counts it no more"
        assert scope[RECORD].connection is None

    play(run)


# ---- time --------------------------------------------------------------------------------------


@pytest.fixture
def reasons(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the reasons for which connections were closed."""
    caplog.set_level(logging.DEBUG, "cloze")
    begin = "a connection was closed: "
    return lambda: [
        message.removeprefix(begin) for message in caplog.messages if message.startswith(begin)
    ]


def test_a_connection_without_a_request_ends(reasons: Callable[[], list[str]]) -> None:
    async def run() -> None:
        silent = World().connect()
        await asyncio.sleep(59.9)
        assert not silent.is_closing()
        await asyncio.sleep(1)
        assert silent.closed_at == pytest.approx(60.0)
        assert silent.calls == ["close"]
        assert reasons() == ["it sent no request in time"]

    play(run)


def test_the_time_without_a_request_begins_with_the_last_answer() -> None:
    async def run() -> None:
        transport = World().connect()
        await asyncio.sleep(50)
        transport.protocol.data_received(GET)
        await asyncio.sleep(59)
        assert statuses(transport) == [200]
        assert not transport.is_closing()
        await asyncio.sleep(2)
        assert transport.closed_at == pytest.approx(110.0)

    play(run)


def test_headers_must_arrive_in_time(reasons: Callable[[], list[str]]) -> None:
    async def run() -> None:
        transport = World().connect()
        await asyncio.sleep(7)
        transport.protocol.data_received(GET[:9])
        await asyncio.sleep(3)
        transport.protocol.data_received(GET[9:12])
        await asyncio.sleep(20)
        assert transport.closed_at == pytest.approx(17.0)
        assert reasons() == ["the headers of its request did not arrive in time"]

    play(run)


def test_headers_behind_a_request_keep_their_time_when_it_is_answered(
    reasons: Callable[[], list[str]],
) -> None:
    async def run() -> None:
        world = World()
        transport = world.connect()
        transport.protocol.data_received(post("/hang") + GET[:9])
        await asyncio.sleep(3)
        world.release.set()
        await asyncio.sleep(20)
        assert statuses(transport) == [200]
        assert transport.closed_at == pytest.approx(10.0)
        assert reasons() == ["the headers of its request did not arrive in time"]

    play(run)


def test_a_connection_that_sends_headers_makes_room_for_a_new_one() -> None:
    async def run() -> None:
        world = World(ConnectionLimits(10.0, 60.0, 1))
        begun = world.connect()
        begun.protocol.data_received(GET[:9])
        second = world.connect()
        assert begun.is_closing()
        await settle()
        second.protocol.data_received(post("/hang") + GET[:9])
        await settle()
        assert world.connect().is_closing(), "its request runs"
        await settle()
        world.release.set()
        await settle()
        assert not world.connect().is_closing()
        assert second.is_closing()

    play(run)


def test_the_body_and_the_answer_have_limits_elsewhere() -> None:
    async def run() -> None:
        world = World()
        slow, hanging = world.connect(), world.connect()
        slow.protocol.data_received(post(length=9))
        hanging.protocol.data_received(post("/hang"))
        await asyncio.sleep(10_000)
        assert not slow.is_closing()
        assert not hanging.is_closing()
        world.release.set()
        await asyncio.sleep(61)
        assert statuses(hanging) == [200]
        assert hanging.closed_at == pytest.approx(10_060.0)

    play(run)


def test_a_body_that_ends_after_its_answer_leaves_the_connection_idle() -> None:
    async def run() -> None:
        transport = World().connect()
        transport.protocol.data_received(post("/unread", b"12", length=4))
        await settle()
        assert statuses(transport) == [200]
        await asyncio.sleep(5)
        transport.protocol.data_received(b"34")
        await asyncio.sleep(100)
        assert transport.closed_at == pytest.approx(60.0)

    play(run)


def test_a_short_header_time_is_kept_exactly() -> None:
    async def run() -> None:
        transport = World(ConnectionLimits(0.5, 60.0, 9)).connect()
        await asyncio.sleep(3.3)
        transport.protocol.data_received(b"GET")
        await asyncio.sleep(2)
        assert transport.closed_at == pytest.approx(3.8)

    play(run)


def test_who_reads_an_answer_is_not_idle() -> None:
    async def run() -> None:
        world = World()
        transport = world.connect()
        transport.protocol.data_received(GET)
        await settle()
        hold = await world.answers.hold("a", 70_000, waits=False)
        assert hold is not None
        transport.protocol.pause_writing()
        transport.unsent = 80_000
        world.answers.sent(transport.protocol, hold)
        for _ in range(80):  # it reads a little, so that the answer does not end it
            await asyncio.sleep(1)
            transport.unsent -= 900
        transport.unsent = 80_000
        assert not transport.is_closing()
        await asyncio.sleep(39)
        assert transport.closed_at < 0 or transport.calls[-1] == "abort"

    play(run)


def test_reading_an_answer_puts_off_the_end_by_the_idle_time() -> None:
    async def run() -> None:
        world = World(ConnectionLimits(3.0, 8.0, 9))
        transport = world.connect()
        hold = await world.answers.hold("a", 70_000, waits=False)
        assert hold is not None
        transport.protocol.pause_writing()
        transport.unsent = 80_000
        world.answers.sent(transport.protocol, hold)
        await asyncio.sleep(8.5)
        assert not transport.is_closing()
        transport.protocol.resume_writing()
        assert not world.answers.is_reading(transport.protocol)
        transport.unsent = 0
        await asyncio.sleep(7)
        assert not transport.is_closing()
        await asyncio.sleep(1)
        assert transport.closed_at == pytest.approx(16.0)

    play(run)


def test_who_does_not_read_is_aborted() -> None:
    async def run() -> None:
        transport = World().connect()
        transport.unsent = 5
        transport.protocol.end("it is slow")
        assert transport.calls == ["abort"]
        await settle()
        transport.protocol.end("again")
        closed = World().connect()
        closed.protocol.end("it is idle")
        closed.protocol.end("it is idle")
        assert closed.calls == ["close"]

    play(run)


def test_bytes_that_the_client_has_not_read() -> None:
    async def run() -> None:
        transport = World().connect()
        protocol = transport.protocol
        transport.unsent = 70
        assert protocol.unread_bytes() == 0, "below the low-water mark"
        protocol.pause_writing()
        assert protocol.unread_bytes() == 70
        assert protocol.unsent_bytes() == 70, "a closed socket has no bytes"
        ours, theirs = socket.socketpair()
        with ours, theirs:
            transport.socket = ours
            assert protocol.unsent_bytes() == 70
            ours.send(bytes(500))
            assert protocol.unsent_bytes() >= 570, "the kernel holds bytes too"

    play(run)


# ---- refusals ----------------------------------------------------------------------------------


def refusing() -> World:
    world = World()
    world.refuses = lambda request: request.path == "/full"
    return world


def test_a_refused_request_leaves_the_connection_open() -> None:
    async def run() -> None:
        world = refusing()
        transport = world.connect()
        transport.protocol.data_received(post("/full", b"12", length=4))
        assert transport.writes == [REFUSAL], "before its body has arrived"
        transport.protocol.data_received(b"34" + post())
        await settle()
        assert statuses(transport) == [429, 200]
        assert world.bodies == [b"1234"], "the body of a refused request is discarded"
        assert not transport.is_closing()
        transport.protocol.data_received(post("/full"))
        await asyncio.sleep(59)
        assert not transport.is_closing()
        await asyncio.sleep(2)
        assert transport.closed_at == pytest.approx(60.0)

    play(run)


def test_the_body_of_a_refused_request_must_arrive_in_time(
    reasons: Callable[[], list[str]],
) -> None:
    async def run() -> None:
        transport = refusing().connect()
        transport.protocol.data_received(post("/full", b"12", length=4))
        await asyncio.sleep(30)
        assert transport.closed_at == pytest.approx(10.0)
        assert reasons() == ["the body of its refused request did not arrive in time"]

    play(run)


@pytest.mark.parametrize(
    "request_bytes",
    [
        post("/full", b"1234", "connection: close"),
        post("/full").replace(b"HTTP/1.1", b"HTTP/1.0", 1),
        post("/full", b"1234", "connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    ],
)
def test_a_refusal_ends_connections_that_are_for_one_request(request_bytes: bytes) -> None:
    async def run() -> None:
        transport = refusing().connect()
        transport.protocol.data_received(request_bytes[:-2])
        [answer] = transport.writes
        assert answer == REFUSAL.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
        assert not transport.is_closing(), "a close would discard the answer"
        transport.protocol.data_received(request_bytes[-2:])
        assert transport.is_closing()

    play(run)


def test_a_refusal_of_a_client_that_waits_to_send_its_body() -> None:
    async def run() -> None:
        transport = refusing().connect()
        transport.protocol.data_received(post("/full", b"", "expect: 100-continue", length=4))
        assert b"\r\nconnection: close\r\n" in transport.writes[0]
        assert transport.is_closing(), "it may send its body or not"

    play(run)


def test_who_does_not_read_refusals_is_closed(reasons: Callable[[], list[str]]) -> None:
    async def run() -> None:
        transport = refusing().connect()
        transport.protocol.pause_writing()
        transport.protocol.data_received(post("/full"))
        assert transport.is_closing()
        assert transport.writes == []
        assert reasons() == ["it does not read the answers"]

    play(run)


def test_requests_of_a_pipeline_are_refused_in_their_turn() -> None:
    async def run() -> None:
        world = refusing()
        transport = world.connect()
        transport.protocol.data_received(post("/hang") + post("/full") + post() + post("/full"))
        await settle()
        assert transport.writes == []
        assert world.asked == ["/hang"], "the gate is asked in the turn of a request"
        world.release.set()
        await settle(60)
        assert statuses(transport) == [200, 429, 200, 429]
        assert world.asked == ["/hang", "/full", "/embed", "/full"]
        assert world.made == 4
        assert not transport.is_closing()
        await asyncio.sleep(59)
        assert not transport.is_closing()
        await asyncio.sleep(2)
        assert transport.closed_at == pytest.approx(60.0)

    play(run)


def test_the_last_refusal_of_a_pipeline_may_close() -> None:
    async def run() -> None:
        world = refusing()
        transport = world.connect()
        last = post("/full", b"1234", "connection: close")
        transport.protocol.data_received(post("/hang") + last)
        await settle()
        world.release.set()
        await settle()
        assert statuses(transport) == [200, 429]
        assert transport.is_closing()

    play(run)


def test_a_held_refusal_comes_late_and_what_follows_waits_for_it() -> None:
    async def run() -> None:
        world = refusing()
        world.hold_s = 0.5
        transport = world.connect()
        transport.protocol.data_received(post("/full", b"12", length=4))
        transport.protocol.data_received(b"34" + post())
        await asyncio.sleep(0.4)
        assert transport.writes == []
        await asyncio.sleep(0.2)
        assert statuses(transport) == [429, 200]
        assert world.bodies == [b"1234"], "the body of a refused request is discarded"
        assert not transport.is_closing()

    play(run)


def test_a_held_refusal_whose_client_leaves_or_waits_or_does_not_read(
    reasons: Callable[[], list[str]],
) -> None:
    async def run() -> None:
        world = refusing()
        world.hold_s = 0.5
        hesitant, gone, unread = world.connect(), world.connect(), world.connect()
        hesitant.protocol.data_received(post("/full", b"", "expect: 100-continue", length=4))
        gone.protocol.data_received(post("/full"))
        gone.close()
        unread.protocol.data_received(post("/full"))
        unread.protocol.pause_writing()
        await asyncio.sleep(1)
        assert unread.is_closing()
        assert reasons() == ["it does not read the answers"]
        assert b"\r\nconnection: close\r\n" in hesitant.writes[0]
        assert hesitant.is_closing(), "it may send its body or not"
        assert gone.writes == []

    play(run)


# ---- the table of connections ------------------------------------------------------------------


def test_the_oldest_idle_connection_makes_room(reasons: Callable[[], list[str]]) -> None:
    async def run() -> None:
        world = World(ConnectionLimits(10.0, 60.0, 3))
        first, second, busy = world.connect(), world.connect(), world.connect()
        busy.protocol.data_received(post("/hang"))
        first.protocol.data_received(GET)
        await settle()
        fourth = world.connect()
        assert (first.is_closing(), second.is_closing()) == (False, True), "it is idle for longest"
        assert reasons() == ["it made room for a new one"]
        await settle()
        assert world.table.closed_count == 1
        fifth = world.connect()
        assert first.is_closing()
        assert not fourth.is_closing()
        assert not fifth.is_closing()

    play(run)


def test_without_an_idle_connection_a_new_one_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        world = World(ConnectionLimits(10.0, 60.0, 2))
        busy = [world.connect(), world.connect()]
        for transport in busy:
            transport.protocol.data_received(post("/hang"))
        await settle()
        refused = world.connect()
        [answer] = refused.writes
        head, body = answer.split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nretry-after: 1\r\n" in head
        message = "the server has 2 connections, the most"
        assert json.loads(body)["error"] == message
        assert refused.is_closing()
        assert f"a connection was refused: {message}" in caplog.text
        await settle()
        world.release.set()
        await settle()
        assert [statuses(transport) for transport in busy] == [[200], [200]]
        again = world.connect()
        assert not again.is_closing()
        assert busy[0].is_closing(), "it is idle since its answer"
        assert not busy[1].is_closing()

    play(run)


def test_connections_that_open_before_others_have_closed() -> None:
    async def run() -> None:
        world = World(ConnectionLimits(10.0, 60.0, 2))
        olds = [world.connect(), world.connect()]
        news = [world.connect(), world.connect()]
        assert [old.is_closing() for old in olds] == [True, True]
        assert [new.is_closing() for new in news] == [False, False]

    play(run)


def test_an_address_has_a_limit() -> None:
    async def run() -> None:
        world = World(ConnectionLimits(10.0, 60.0, 100, max_per_address=2))
        own = [world.connect(), world.connect()]
        assert not any(one.is_closing() for one in own)
        third = world.connect()
        message = "the address has 3 connections, and 2 at most"
        assert json.loads(third.writes[0].split(b"\r\n\r\n")[1])["error"] == message
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

    play(run)


def test_no_limit_per_address_by_default() -> None:
    async def run() -> None:
        world = World()
        assert not any(world.connect().is_closing() for _ in range(50))

    play(run)


def test_a_lost_connection_leaves_nothing(reasons: Callable[[], list[str]]) -> None:
    async def run() -> None:
        world = World()
        transport = world.connect()
        transport.protocol.data_received(post("/hang"))
        await settle()
        hold = await world.answers.hold("a", 70_000, waits=False)
        assert hold is not None
        transport.protocol.pause_writing()
        transport.unsent = 9
        world.answers.sent(transport.protocol, hold)
        scope: Any = transport.protocol.scope
        transport.protocol.connection_lost(ConnectionError())
        assert scope[RECORD].connection is None, "else a cycle"
        assert not world.answers.is_reading(transport.protocol)
        assert (world.table._open, world.table.closed_count) == (0, 1)
        assert not world.table.idle
        assert not world.table._by_address, "else it grows by each address"
        quiet = world.connect()
        quiet.protocol.connection_lost(None)
        assert not world.table.idle
        await asyncio.sleep(120)
        assert reasons() == [], "its timer has ended"

    play(run)


# ---- the end of the server ---------------------------------------------------------------------


def test_a_drain_ends_idle_connections_and_those_that_open_late() -> None:
    async def run() -> None:
        world = World()
        idle, hanging = world.connect(), world.connect()
        hanging.protocol.data_received(post("/hang"))
        await settle()
        world.table.is_draining = True
        for transport in (idle, hanging):
            transport.protocol.shutdown()
        late = world.connect()
        assert (idle.is_closing(), hanging.is_closing(), late.is_closing()) == (True, False, True)
        await asyncio.sleep(100)
        assert not hanging.is_closing(), "the drain limits the time of bodies only"
        world.release.set()
        await settle()
        assert statuses(hanging) == [200]
        assert b"connection: close" in hanging.writes[0]
        assert hanging.is_closing()

    play(run)


def test_a_drain_waits_five_seconds_for_a_body(reasons: Callable[[], list[str]]) -> None:
    async def run() -> None:
        world = World()
        half, whole = world.connect(), world.connect()
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

    play(run)
