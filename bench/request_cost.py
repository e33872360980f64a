"""What a request to /embed costs the event loop's thread: the application alone, without sockets, an engine that answers at once.

    python bench/request_cost.py [--profile]

Times are of the thread's processor time, so that they hardly depend on what else runs.
"""

import asyncio
import cProfile
import pstats
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import uvloop
from starlette.types import ASGIApp, Message

from model_store import Bundle
from model_store.batch import Encoding, HeadOutputs
from model_store.heads.embedding import HEAD, EmbeddingResult
from model_store.manifest import Precision
from service.app import single_process
from service.core import Device, RequestedPrecision
from service.settings import Settings

BODY = orjson.dumps({"inputs": "what is the capital of france and how many people live there"})
REQUESTS, ROUNDS = 500, 7


class Instant:
    """An engine whose answers cost nothing."""

    device = Device.CPU
    precision = Precision.FP32
    reason = "it computes nothing"
    supports_varlen = False

    def __init__(self, bundle: Bundle, device: Device, precision: RequestedPrecision) -> None:  # noqa: ARG002
        assert bundle.manifest.embedding is not None
        vector = (
            np.random.default_rng(0)
            .normal(size=bundle.manifest.embedding.dimensions)
            .astype(np.float32)
        )
        self._answer = {HEAD.name: EmbeddingResult(vector)}

    def run(self, batch: Sequence[Encoding]) -> list[HeadOutputs]:
        """See `Engine`."""
        return [self._answer for _ in batch]

    def probe(self) -> None:
        """See `Engine`."""


async def request(app: ASGIApp) -> None:
    """One, as uvicorn hands it over."""
    headers = [
        (b"host", b"bench"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(BODY)).encode()),
    ]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
    }
    scope |= {
        "path": "/embed",
        "raw_path": b"/embed",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
    }
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "state": {}}
    messages: list[Message] = [{"type": "http.request", "body": BODY, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Future()

    async def send(message: Message) -> None:
        assert message.get("status", 200) == 200

    await app(scope, receive, send)


async def main(*, profile: bool) -> None:
    """Print the quickest round, or a profile of one."""
    app = single_process(Settings(model=("cloze-bert",), workers=2), Instant).api()
    async with app.router.lifespan_context(app):
        best = float("inf")
        for _ in range(ROUNDS):
            started = time.thread_time()
            for _ in range(REQUESTS):
                await request(app)
            best = min(best, (time.thread_time() - started) / REQUESTS)
        print(f"{best * 1e6:.0f} us a request on the event loop's thread")
        if profile:
            profiler = cProfile.Profile(time.thread_time)
            profiler.enable()
            for _ in range(REQUESTS):
                await request(app)
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    uvloop.run(main(profile="--profile" in sys.argv))
