"""The clients of a world: each connection is a simulated thread that asks and reacts."""

import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import orjson

from tests.support.world import adapters
from tests.support.world.network import ClientConnection, Gone, Late
from tests.support.world.server import BULK, POISON, WORDS, vector

if TYPE_CHECKING:
    from tests.support.world.history import World

PATIENCE_S = 45.0
"""How long a client waits that does not leave before; the server ends each request earlier."""


@dataclass(eq=False)
class Asked:
    """A request and what came of it.

    Attributes:
        began, sent, ended: when the client began to send, had sent all, and had the outcome.
        limit_s: the time limit that the request states.
        status: of the answer; 0 while there is none.
        lost: why there is no answer: the client left, or the server ended the connection.
        told_s: when to come back, from ``retry-after-ms``.
        room_s: seconds in which there was room for it while it waited as told.
        read_s: seconds in which the client did not read what had come.
        returns: whether the request was refused before, and comes back as told.
        is_first: whether the connection had no request before.
        adapter: the number of the adapter that it asks for; 0: none.
    """

    kind: str
    address: str
    texts: list[str]
    began: float
    limit_s: float | None = None
    sent: float | None = None
    ended: float | None = None
    status: int = 0
    lost: str = ""
    told_s: float = 0.0
    room_s: float = 0.0
    read_s: float = 0.0
    error: str = ""
    version: int = 0
    returns: bool = False
    is_first: bool = False
    adapter: int = 0

    @cached_property
    def lengths(self) -> list[int]:
        """The numbers of tokens of its texts."""
        return [text.count(" ") + 3 for text in self.texts]

    def __str__(self) -> str:
        end = "pending" if self.ended is None else f"{self.ended:.3f}"
        what = self.lost or f"{self.status} {self.error}"
        return f"{self.kind} {self.address} {len(self.texts)} texts {self.began:.3f}-{end}: {what}"


@dataclass(frozen=True)
class Kind:
    """How the clients of a kind behave.

    Attributes:
        words: fewest and most words per text.
        texts: most texts per request.
        pause_s: longest pause between two requests.
        waits: whether a refused client waits as it is told; 0.0: it comes back at once.
        limit_s: shortest and longest stated time limit.
        leaves_s: longest time after which the client closes its connection; 0: it does not.
        writes_s: longest time in which the client sends a body.
        reads_s: longest pause before the client reads a part of an answer.
        padding: most bytes of spaces in a body.
        is_bulk: whether it sends bulk requests.
        poison: share of its requests with a text that the engine cannot run.
        renews: share of the answers after which it opens a new connection.
    """

    words: tuple[int, int] = (10, 90)
    texts: int = 1
    pause_s: float = 0.0
    waits: bool = True
    limit_s: tuple[float, float] | None = None
    leaves_s: float = 0.0
    writes_s: float = 0.0
    reads_s: float = 0.0
    padding: int = 0
    is_bulk: bool = False
    poison: float = 0.0
    renews: float = 0.0


KINDS = {
    "polite": Kind(pause_s=2.0),
    "loop": Kind(),
    "storm": Kind(waits=False),
    "told": Kind(),
    "limited": Kind(pause_s=0.5, limit_s=(0.4, 4.0)),
    "leaving": Kind(pause_s=0.2, texts=3, leaves_s=1.5),
    "slow writer": Kind(writes_s=40.0, pause_s=1.0),
    "slow reader": Kind(words=(5, 20), texts=24, reads_s=15.0, pause_s=1.0),
    "bulk": Kind(words=(30, 200), texts=3, is_bulk=True),
    "greedy": Kind(words=(100, 500), texts=4),
    "long": Kind(words=(500, 3000), pause_s=1.0),
    "poison": Kind(texts=3, poison=0.3, pause_s=1.0),
    "large": Kind(pause_s=0.5, padding=300_000),
    "new connections": Kind(pause_s=0.2, renews=1.0),
    "crowd": Kind(waits=False, leaves_s=0.4),
    "hurried": Kind(words=(10, 200), waits=False, limit_s=(1.0, 8.0), pause_s=0.5),
    "unhurried": Kind(words=(100, 600), limit_s=(4.0, 20.0), pause_s=0.5),
}

CROWDS = ("crowd", "hurried", "unhurried")
"""The kinds that come on many connections."""


def key_name(address: str) -> str:
    """Return the API key of the client with an address."""
    return f"key-{address.rpartition('.')[2]}"


class Client:
    """One connection of a client, which asks until a time."""

    def __init__(self, world: "World", kind: str, address: str, seed: str) -> None:
        self.world, self.name, self.kind = world, kind, KINDS[kind]
        self.address, self.random, self.seed = address, random.Random(seed), seed
        self.connection: ClientConnection | None = None

    def run(self, until: float) -> None:
        """Ask again and again; the last request is waited for."""
        kernel = self.world.kernel
        asked: Asked | None = None
        while kernel.now < until:
            refused = asked is not None and asked.status == 429
            asked = self.ask(asked if refused else None)
            if asked.status == 429 and self.kind.waits:
                self.world.waiting.append(asked)
                kernel.sleep(asked.told_s)
                self.world.waiting.remove(asked)
            elif asked.status in (0, 503):
                kernel.sleep(0.2 + 0.3 * self.random.random())
            elif self.kind.pause_s:
                kernel.sleep(self.kind.pause_s * self.random.random())
            if self.kind.renews and self.random.random() < self.kind.renews:
                self._close()
        self._close()
        self.world.last.pop(self.seed, None)

    def run_once(self) -> None:
        """Ask once."""
        self.ask(None)
        self._close()

    def _close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _texts(self) -> list[str]:
        draw = self.random
        texts = []
        for _ in range(draw.randint(1, self.kind.texts)):
            words = draw.choices(WORDS, k=draw.randint(*self.kind.words))
            if self.kind.is_bulk:
                words[0] = BULK
            if draw.random() < self.kind.poison:
                words[-1] = POISON
            texts.append(" ".join(words))
        return texts

    def ask(self, refused: Asked | None) -> Asked:
        """Send a request, that which was refused again, and take its answer; check both."""
        world, draw, kernel = self.world, self.random, self.world.kernel
        texts = self._texts() if refused is None else refused.texts
        returns = refused is not None and self.kind.waits
        asked = Asked(self.name, self.address, texts, kernel.now, returns=returns)
        if self.kind.limit_s:
            asked.limit_s = round(draw.uniform(*self.kind.limit_s), 2)
        if world.history.has_adapters and draw.random() < 0.5:
            asked.adapter = draw.randint(1, len(adapters.NAMES))
        number = world.asked(asked)
        world.last[self.seed] = asked
        until = kernel.now + PATIENCE_S
        if self.kind.leaves_s:
            until = kernel.now + self.kind.leaves_s * draw.random()
        try:
            if self.connection is None or self.connection.is_ended:
                self._close()
                asked.is_first = True
                self.connection = ClientConnection(world.server.listener, self.address)
            self._send(asked, number, until)
            head, body = self._receive(asked, until)
            self._take(asked, number, head, body)
            if self.kind.writes_s and asked.status != 200:  # its body may not be whole
                self._close()
        except Gone:
            asked.lost = "the server ended the connection"
        except Late:
            asked.lost = "the client left"
        asked.ended = kernel.now
        if asked.lost:
            self._close()
        world.answered(asked)
        return asked

    def _send(self, asked: Asked, number: int, until: float) -> None:
        assert self.connection is not None
        draw, kernel = self.random, self.world.kernel
        named = {"model": adapters.NAMES[asked.adapter - 1]} if asked.adapter else {}
        body = orjson.dumps({"inputs": asked.texts, **named})
        if self.kind.padding:
            body += b" " * draw.randint(0, self.kind.padding)
        head = f"POST /embed HTTP/1.1\r\nhost: x\r\nx-request-id: {number}\r\n"
        if asked.limit_s:
            head += f"x-request-timeout-ms: {asked.limit_s * 1000:.0f}\r\n"
        if self.kind.is_bulk:
            head += "x-request-class: bulk\r\n"
        if self.world.server.keys:
            head += f"authorization: Bearer {key_name(self.address)}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        parts = [head.encode() + body]
        if self.kind.writes_s:
            size = len(body) // 10 + 1
            parts = [head.encode(), *(body[i : i + size] for i in range(0, len(body), size))]
        pause_s = self.kind.writes_s * draw.random() / len(parts)
        for part in parts:
            if self.kind.writes_s:
                if self.connection.has_something:
                    break
                kernel.sleep(pause_s)
            self.connection.send(part, until)
        asked.sent = kernel.now

    def _receive(self, asked: Asked, until: float) -> tuple[dict[str, str], bytes]:
        """Return the headers, with the status, and the body of an answer."""
        connection = self.connection
        assert connection is not None
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.read(until)
        head, _, body = data.partition(b"\r\n\r\n")
        line, *fields = head.decode().split("\r\n")
        headers = dict(field.split(": ", 1) for field in fields)
        headers["status"] = line.split()[1]
        size = int(headers["content-length"])
        while len(body) < size:
            if self.kind.reads_s:
                pause_s = self.kind.reads_s * self.random.random()
                self.world.kernel.sleep(pause_s)
                asked.read_s, until = asked.read_s + pause_s, until + pause_s
            body += connection.read(until)
        if len(body) > size:
            self.world.fails(f"bytes after an answer: {body[size:][:60]!r}")
        return headers, body

    def _take(self, asked: Asked, number: int, headers: dict[str, str], body: bytes) -> None:
        """Note the answer; a result must be that of the texts."""
        asked.status = int(headers["status"])
        if headers["status"] != "431" and headers.get("x-request-id") != str(number):
            refused = asked.status in (500, 503) and "x-request-id" not in headers  # by the server
            if not refused:
                self.world.fails(f"{asked} has the id {headers.get('x-request-id')}, not {number}")
        if asked.status == 200:
            asked.version = int(headers["x-model"].partition("@")[2])
            if asked.adapter:  # whose version is always 1
                asked.version = int(orjson.loads(body)[0][3]) % 1000
            version = asked.version + 1000 * asked.adapter
            dimensions = self.world.server.dimensions
            expected = [vector(text, version, dimensions) for text in asked.texts]
            if orjson.loads(body) != expected:
                self.world.fails(f"{asked} has another answer than its own: {body[:80]!r}")
        if asked.status != 200:
            is_json = headers["content-type"] == "application/json"
            asked.error = orjson.loads(body)["error"] if is_json else body[:80].decode()
        if asked.status == 429:
            asked.told_s = int(headers["retry-after-ms"]) / 1000
        if headers.get("connection") == "close":
            self._close()


def probe(world: "World", path: str) -> bytes:
    """Return the answer to a GET on a new connection; status 0: there is none within 2 s."""
    until, connection, data = world.kernel.now + 2.0, None, b""
    try:
        connection = ClientConnection(world.server.listener, "10.2.0.1")
        head = f"GET {path} HTTP/1.1\r\nhost: 10.0.0.1\r\nauthorization: Bearer key-metrics\r\n"
        connection.send(f"{head}connection: close\r\n\r\n".encode(), until)
        while True:
            data += connection.read(until)
    except (Gone, Late):
        return data or b"HTTP/1.1 0"
    finally:
        if connection is not None:
            connection.close()
