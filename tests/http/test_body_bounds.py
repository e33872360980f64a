"""What any body costs a server, valid or not: memory by its bytes, and no stop of the event loop.

The bodies follow from the OpenAPI document: for each route, and for each list, object, text and
number that its body may have, one body that repeats something there up to a size.
"""

import http.client
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.support.cores import Stopwatch
from tests.support.serving import Server, running_server

MB = 1_000_000
MOST_MB, MOST_PER_BYTE = 32, 16
MOST_WAIT_S = 0.25
"""Longest answer of ``/healthz`` meanwhile, if there is a core; usually it is 0.02 s."""

RETURNING_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""Variables that let glibc give freed memory back, so that each request's growth shows."""

Filler = Callable[[int], bytes]
"""A number of bytes -> about so many bytes of JSON."""


def units(unit: str, separator: str = ",") -> Filler:
    """Return a filler that repeats a value."""

    def fill(size: int) -> bytes:
        count = size // len((unit + separator).encode())
        return separator.join([unit] * count).encode()

    return fill


def members(size: int) -> bytes:
    """Return members of an object with different names."""
    return b",".join(b'"%x":1' % number for number in range(size // 8))


def nested(size: int) -> bytes:
    """Return lists inside each other."""
    return b"[" * (size // 2) + b"]" * (size // 2)


WRONG = ("1", "[]", "{}", '"ab"', "null", "1.2345678901234567e-300", '{"a":[]}', "9" * 4000)
TEXTS = ("a", "a ", "\\n", "\\u00e9", "\U0001f600")
NUMBERS = ("9", "0.", " ")
WHOLE: Mapping[str, Filler] = {
    "nothing": lambda size: b" " * size,
    "open lists": lambda size: b"[" * size,
    "open objects": units('{"a":', ""),
    "lists in lists": nested,
    "quotes": lambda size: b'"' * size,
    "escapes": lambda size: b"\\" * size,
    "commas": lambda size: b"," * size,
    "zeros": lambda size: b"\0" * size,
    "one text": lambda size: b'"' + b"a" * size,
}
"""Bodies that fit no schema."""


@dataclass(frozen=True)
class Body:
    """A way to fill one place in the body of a route."""

    name: str
    path: str
    before: bytes
    fill: Filler
    after: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    def data(self, size: int) -> bytes:
        return self.before + self.fill(size - len(self.before) - len(self.after)) + self.after


class Schemas:
    """The request bodies of an OpenAPI document."""

    def __init__(self, document: Mapping[str, Any], *, thorough: bool) -> None:
        self._document, self._thorough = document, thorough

    def bodies(self, models: list[str]) -> Iterator[Body]:
        """Yield the bodies of all routes; ``models`` are those of the Open Inference Protocol."""
        for path, operations in self._document["paths"].items():
            request = operations.get("post", {}).get("requestBody")
            if request is None:
                continue
            content = request["content"]["application/json"]
            example = next(iter(content["examples"].values()))["value"]
            names = models if path.endswith("/{model}/infer") else models[:1]
            for name in names if "{model}" in path else [""]:
                actual = path.replace("{model}", name).replace("{version}", "1")
                for place, before, fill, after in self._places(content["schema"], example):
                    yield Body(f"{actual} {place}", actual, before, fill, after)

    def _places(
        self, schema: Mapping[str, Any], example: Any, place: str = "", depth: int = 0
    ) -> Iterator[tuple[str, bytes, Filler, bytes]]:
        """Yield each place of a value that fits a schema: name, JSON before, filler, JSON after."""
        schema = self._resolved(schema)
        for choice in schema.get("anyOf", ()):
            yield from self._places(choice, None, place, depth)
        kind = schema.get("type")
        if kind == "array":
            items = schema.get("items", {})
            right = orjson.dumps(self._sample(items)).decode()
            for unit in dict.fromkeys([right, *(WRONG if self._thorough else WRONG[:2])]):
                yield f"{place}[{unit[:9]}]", b"[", units(unit), b"]"
            for name, before, fill, after in self._places(items, None, f"{place}[]", depth + 1):
                yield name, b"[" + before, fill, after + b"]"
        elif kind == "object":
            yield from self._object_places(schema, example, place, depth)
        elif kind == "string" and "enum" not in schema:
            for text in TEXTS if self._thorough else TEXTS[2:3]:
                yield f"{place}={text}", b'"', units(text, ""), b'"'
        elif kind in ("integer", "number") and self._thorough:
            for text in NUMBERS:
                yield f"{place}={text}", b"1", units(text, ""), b""

    def _object_places(
        self, schema: Mapping[str, Any], example: Any, place: str, depth: int
    ) -> Iterator[tuple[str, bytes, Filler, bytes]]:
        value = example if isinstance(example, dict) else self._sample(schema)
        own = orjson.dumps(value)[1:-1]
        yield f"{place}{{names}}", b"{" + own + b"," * bool(own), members, b"}"
        yield f"{place}{{one name}}", b"{" + own + b"," * bool(own), units('"a":1'), b"}"
        for name, part in schema.get("properties", {}).items():
            others = {key: other for key, other in value.items() if key != name}
            start = orjson.dumps(others)[:-1] + b"," * bool(others) + b'"%s":' % name.encode()
            for inner, before, fill, after in self._places(
                part, value.get(name), f"{place}.{name}", depth + 1
            ):
                yield inner, start + before, fill, after + b"}"

    def _sample(self, schema: Mapping[str, Any]) -> Any:
        """Return a value that fits a schema."""
        schema = self._resolved(schema)
        if "anyOf" in schema:
            return self._sample(schema["anyOf"][0])
        if "enum" in schema:
            return schema["enum"][0]
        if "const" in schema:
            return schema["const"]
        if schema.get("type") == "array":
            parts = schema.get("prefixItems") or [schema.get("items", {})]
            return [self._sample(part) for part in parts]
        if schema.get("type") == "object":
            needed = schema.get("required", ())
            return {name: self._sample(schema["properties"][name]) for name in needed}
        return {"string": "walk", "boolean": True, "null": None}.get(schema.get("type", ""), 1)

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        return schema


class Health:
    """Polls ``/healthz`` on a connection of its own; `worst_s` is its slowest answer."""

    def __init__(self, server: Server) -> None:
        self._address, self._pid = urlsplit(server.url).netloc, server.process.pid
        self._ends = threading.Event()
        self.worst_s = 0.0

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=60)
        while not self._ends.wait(0.002):
            stopwatch = Stopwatch(self._pid)
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            self.worst_s = max(self.worst_s, stopwatch.elapsed_s())
        connection.close()

    def end(self) -> None:
        self._ends.set()


@contextmanager
def polled(server: Server) -> Iterator[Health]:
    health = Health(server)
    thread = threading.Thread(target=health.run)
    thread.start()
    try:
        yield health
    finally:
        health.end()
        thread.join()


def status_kb(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


@dataclass(frozen=True)
class Cost:
    status: int
    bytes: int
    growth_mb: float
    wait_s: float
    total_s: float

    @property
    def is_bounded(self) -> bool:
        most_mb = MOST_MB + MOST_PER_BYTE * self.bytes / MB
        return self.status < 500 and self.growth_mb <= most_mb and self.wait_s <= MOST_WAIT_S


def cost(server: Server, client: httpx.Client, health: Health, body: Body, size: int) -> Cost:
    """Send a body and return what the request cost the server."""
    data, pid = body.data(size), server.process.pid
    headers = {"x-request-timeout-ms": "20000", **body.headers}
    before = status_kb(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    health.worst_s = 0.0
    started = time.monotonic()
    answer = client.post(body.path, content=data, headers=headers)
    total_s = time.monotonic() - started
    growth_mb = (status_kb(pid, "VmHWM") - before) * 1024 / MB
    return Cost(answer.status_code, len(data), growth_mb, health.worst_s, total_s)


def all_bodies(client: httpx.Client, *, thorough: bool) -> list[Body]:
    schemas = Schemas(client.get("/openapi.json").json(), thorough=thorough)
    models = client.get("/v2/models").json()["models"]
    one_per_task = list({name.rpartition(".")[2]: name for name in models}.values())
    bodies = list(schemas.bodies(one_per_task if thorough else models[:1]))
    bodies += [Body(f"/ {name}", "/", b"", fill, b"") for name, fill in WHOLE.items()]
    head = orjson.dumps(
        {
            "inputs": [
                {
                    "name": "text",
                    "shape": [1],
                    "datatype": "BYTES",
                    "parameters": {"binary_data_size": 7 * MB},
                }
            ]
        }
    )
    length = {"inference-header-content-length": str(len(head))}
    path = f"/v2/models/{models[0]}/infer"
    bodies.append(Body("empty binary texts", path, head, lambda size: bytes(size), b"", length))
    return bodies


@pytest.mark.parametrize(
    ("size", "thorough"),
    [
        pytest.param(MB, False, marks=pytest.mark.timeout(600)),
        pytest.param(8 * MB, True, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
    ids=["1-MB", "8-MB"],
)
def test_a_body_costs_no_more_than_its_bytes(size: int, thorough: bool) -> None:
    with (
        running_server(DEFAULT_ROOT, **RETURNING_MEMORY) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        polled(server) as health,
    ):
        bodies = all_bodies(client, thorough=thorough)
        client.post("/embed", json={"inputs": ["walk"] * 64}).raise_for_status()
        unbounded = {}
        for body in bodies:
            spent = cost(server, client, health, body, size)
            if not spent.is_bounded:
                unbounded[body.name] = spent
            times = f"{spent.wait_s * 1000:6.0f} of {spent.total_s * 1000:6.0f} ms"
            print(f"{times} {spent.growth_mb:6.0f} MB {spent.status} {body.name}")
    assert len({body.path for body in bodies}) > 15
    assert not unbounded
