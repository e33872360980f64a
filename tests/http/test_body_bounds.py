"""What any body costs a server, valid or not: memory by its bytes, and no answer of a status above 499.

The bodies follow from the examples in the OpenAPI document: for each route, and for each value in its
example, one body that repeats something there up to a size.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.fuzz.damage import paths_of
from tests.support.faulty import WORDS
from tests.support.serving import Server, running_server

MB = 1_000_000
MOST_MB, MOST_PER_BYTE = 16, 16

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


PLACE = "the place to fill"
VALUES = ('"ab"', "1", "[]", "null", "1.2345678901234567e-300", '{"a":[]}', "9" * 4000)
"""Values that a list may repeat, right and wrong ones."""

FILLERS: dict[str, tuple[bytes, Filler, bytes]] = {
    **{f"[{value[:9]}]": (b"[", units(value), b"]") for value in VALUES},
    **{f"={text}": (b'"', units(text, ""), b'"') for text in ("a ", "\\u00e9", "\U0001f600")},
    "=9": (b"1", units("9", ""), b""),
    "{names}": (b"{", members, b"}"),
    "[[]]": (b"", nested, b""),
}
"""Name -> JSON before what repeats, what repeats, JSON after."""

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
        left = size - len(self.before) - len(self.after)
        return self.before + _filled(self.fill, left // 10_000 * 10_000) + self.after


@lru_cache(32)
def _filled(fill: Filler, size: int) -> bytes:
    return fill(size)


@dataclass(frozen=True)
class Cost:
    status: int
    bytes: int
    growth_mb: float

    @property
    def is_bounded(self) -> bool:
        most_mb = MOST_MB + MOST_PER_BYTE * self.bytes / MB
        return self.status < 500 and self.growth_mb <= most_mb


def _memory_kb(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def cost(server: Server, client: httpx.Client, body: Body, size: int) -> Cost:
    """Send a body and return what the request cost the server."""
    data, pid = body.data(size), server.process.pid
    headers = {"x-request-timeout-ms": "20000", **body.headers}
    before = _memory_kb(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    answer = client.post(body.path, content=data, headers=headers)
    growth_mb = (_memory_kb(pid, "VmHWM") - before) * 1024 / MB
    return Cost(answer.status_code, len(data), growth_mb)


def of_example(name: str, path: str, example: Any) -> Iterator[Body]:
    """Yield an example with each of its values replaced by each filler."""
    for place in paths_of(example):
        body = copy.deepcopy(example)
        inner: Any = body
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = PLACE
        before, after = orjson.dumps(body).split(orjson.dumps(PLACE))
        for kind, (start, fill, end) in FILLERS.items():
            yield Body(f"{name} {place}{kind}", path, before + start, fill, end + after)


def all_bodies(client: httpx.Client) -> list[Body]:
    models = client.get("/v2/models").json()["models"]
    bodies = [Body(f"/ {name}", "/", b"", fill, b"") for name, fill in WHOLE.items()]
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        if request := operations.get("post", {}).get("requestBody"):
            content = request["content"]["application/json"]
            example = next(iter(content["examples"].values()))["value"]
            named = path.format(model=models[0], version="1", organization="nvidia")
            bodies += of_example(path, named, example)
    sent = {"name": "text", "shape": [1], "datatype": "BYTES"}
    head = orjson.dumps({"inputs": [sent | {"parameters": {"binary_data_size": 7 * MB}}]})
    length = {"inference-header-content-length": str(len(head))}
    path = f"/v2/models/{models[0]}/infer"
    bodies.append(Body("empty binary texts", path, head, lambda size: bytes(size), b"", length))
    return bodies


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    patience = {"CLOZE_REQUEST_TIMEOUT_MS": "120000"}  # a busy machine needs longer than 30 s
    with running_server(DEFAULT_ROOT, **RETURNING_MEMORY, **patience) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_body_costs_no_more_than_its_bytes(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        bodies = all_bodies(client)
        client.post("/embed", json={"inputs": ["walk"] * 64}).raise_for_status()
        costs = {body.name: cost(server, client, body, 4 * MB) for body in bodies}
    assert len({body.path for body in bodies}) > 15
    assert not {name: spent for name, spent in costs.items() if not spent.is_bounded}


@pytest.mark.parametrize(
    ("space", "words", "parameters"),
    [(15_000, 60, {}), (1, 1500, {"max_seq_len": 384, "doc_stride": 360})],
    ids=["spans over spaces", "windows that overlap"],
)
def test_answers_have_no_more_memory_than_a_bound(
    server: Server, space: int, words: int, parameters: dict[str, int]
) -> None:
    """Spans of a context overlap, and so do windows."""
    context = (" " * space).join((WORDS * 150)[:words])
    asked = {"top_k": 1000, "max_answer_len": 64, **parameters}
    question = {"question": "where?", "context": context}
    data = orjson.dumps({"inputs": question, "parameters": asked})
    with httpx.Client(base_url=server.url, timeout=120) as client:
        few = {"inputs": question, "parameters": asked | {"top_k": 1}}
        client.post("/qa", json=few).raise_for_status()
        spent = cost(server, client, Body("", "/qa", data, lambda _: b"", b""), len(data))
        assert spent.status == 422
        assert spent.is_bounded, spent
