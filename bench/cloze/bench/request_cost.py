"""Measures the processor time of a request to ``/embed`` on the event loop's thread.

    python bench/request_cost.py [--profile] 2>/dev/null

A second figure is that of a server with ten API keys, of which the request has the last one. The
application runs alone, without sockets, on an engine that returns at once. Times are processor
times of the thread, so other work on the machine hardly changes them.
"""

import asyncio
import cProfile
import hashlib
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvloop
from starlette.types import ASGIApp, Message

from cloze.model_store import Bundle
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.embedding import HEAD
from cloze.model_store.manifest import Precision
from cloze.service.core import Device, RequestedPrecision
from cloze.service.observe.logs import start_logging
from cloze.service.service import single_process
from cloze.service.settings import Settings

BODY = orjson.dumps({"inputs": "what is the capital of france and how many people live there"})
REQUESTS, ROUNDS = 50, 100
_PROFILE_ROWS = 40
KEYS = [f"clz_{number}" for number in range(10)]
AUTHORIZATION = [(b"authorization", f"Bearer {KEYS[-1]}".encode())]


class Instant:
    """An engine that returns a constant vector without computing anything."""

    device = Device.CPU
    precision = Precision.FP32
    reason = "it computes nothing"
    supports_varlen = False
    adapters = None

    def __init__(self, bundle: Bundle, device: Device, precision: RequestedPrecision) -> None:  # noqa: ARG002
        assert bundle.manifest.embedding is not None
        dimensions = bundle.manifest.embedding.dimensions
        vector = np.random.default_rng(0).normal(size=dimensions).astype(np.float32)
        self._outputs = {HEAD.name: ArrayResult(vector)}

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:  # noqa: ARG002
        """Return the constant vector for each encoding; see `Engine`."""
        return [self._outputs for _ in batch]

    def probe(self) -> None:
        """Do nothing; see `Engine`."""


def _scope() -> dict[str, Any]:
    """Return the ASGI scope of a request, as uvicorn passes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/embed",
        "raw_path": b"/embed",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(BODY)).encode()),
            *AUTHORIZATION,
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }


async def request(app: ASGIApp) -> None:
    """Send one request to the application."""
    messages: list[Message] = [{"type": "http.request", "body": BODY, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Future()

    async def send(message: Message) -> None:
        assert message.get("status", 200) == 200

    await app(_scope(), receive, send)


async def _send_all(app: ASGIApp) -> None:
    for _ in range(REQUESTS):
        await request(app)


async def _fastest_rounds_s(apps: Sequence[ASGIApp]) -> list[float]:
    """Return the processor seconds per request of each application's fastest round."""
    fastest = [float("inf") for _ in apps]
    for _ in range(ROUNDS):
        for number, app in enumerate(apps):
            started = time.thread_time()
            await _send_all(app)
            fastest[number] = min(fastest[number], (time.thread_time() - started) / REQUESTS)
    return fastest


async def _print_profile(app: ASGIApp) -> None:
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    await _send_all(app)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(_PROFILE_ROWS)


async def main(*, profile: bool) -> None:
    """Print the time per request, and a profile if asked for."""
    start_logging("info", "text")
    with tempfile.TemporaryDirectory() as folder:
        keys_file = Path(folder, "keys.toml")
        hashes = (hashlib.sha256(key.encode()).hexdigest() for key in KEYS)
        keys_file.write_text(
            "".join(
                f'[key{number}]\nsha256 = "{digest}"\nscopes = ["inference"]\n'
                for number, digest in enumerate(hashes)
            )
        )
        keys_file.chmod(0o600)
        with ExitStack() as stack:
            apps = []
            for keys in (None, keys_file):
                settings = Settings(model=("cloze-bert",), workers=2, keys_file=keys)
                apps.append(single_process(settings, Instant))
                stack.callback(apps[-1].close)
                apps[-1].begin()
            plain_us, keys_us = (seconds * 1e6 for seconds in await _fastest_rounds_s(apps))
            print(f"{plain_us:.0f} us per request on the event loop's thread")
            print(f"{keys_us:.0f} us with {len(KEYS)} keys, {keys_us / plain_us - 1:+.1%}")
            if profile:
                await _print_profile(apps[0])


if __name__ == "__main__":
    uvloop.run(main(profile="--profile" in sys.argv))
