"""Tasks of one encoder share batches: seen at the engine's own door."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cloze.model_store import Bundle
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.service.core import Device, RequestedPrecision
from cloze.service.engine.onnx_engine import OnnxEngine
from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.support.faulty import assert_close
from tests.support.waiting import wait_until


class WatchedEngine(OnnxEngine):
    """The real engine; remembers its batches, and waits while its gate is closed."""

    def __init__(self, bundle: Bundle, device: Device, precision: RequestedPrecision) -> None:
        super().__init__(bundle, device, precision)
        self.batches: list[list[Encoding]] = []
        self.gate = threading.Event()
        self.gate.set()

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        self.batches.append(list(batch))
        self.gate.wait(20)
        return super().run(batch)


@contextmanager
def watched(
    store: Path, model: str
) -> Iterator[tuple[TestClient, WatchedEngine, Callable[[], int]]]:
    """A client, the engine behind it, and the tokens that wait; one worker."""
    engines: list[WatchedEngine] = []

    def make(bundle: Bundle, device: Device, precision: RequestedPrecision) -> WatchedEngine:
        engines.append(WatchedEngine(bundle, device, precision))
        return engines[0]

    service = single_process(
        load_settings({"model_store": store, "model": model, "workers": 1}), make
    )
    with TestClient(service, base_url="http://localhost") as client:
        yield (
            client,
            engines[0],
            lambda: service.snapshot.models.pipelines[0].model.queue.state.tokens,
        )


def send_together(
    client: TestClient,
    engine: WatchedEngine,
    waiting: Callable[[], int],
    tokens: int,
    requests: list[tuple[str, dict[str, Any]]],
) -> list[Any]:
    """Close the gate, occupy the worker, queue all requests, open the gate."""

    def post(request: tuple[str, dict[str, Any]]) -> Any:
        response = client.post(request[0], json=request[1])
        assert response.status_code == 200, response.text
        return response.json()

    alone = [post(request) for request in requests]
    engine.gate.clear()
    engine.batches.clear()
    with ThreadPoolExecutor(len(requests) + 1) as pool:
        blocker = pool.submit(post, requests[0])
        wait_until(lambda: bool(engine.batches))
        futures = [pool.submit(post, request) for request in requests]
        wait_until(lambda: waiting() >= tokens)
        engine.gate.set()
        together = [future.result() for future in futures]
        assert_close(blocker.result(), alone[0])
    for one, other in zip(together, alone, strict=True):
        assert_close(one, other)
    return together


@pytest.mark.timeout(60)
def test_fill_mask_nsp_and_embed_share_one_batch(tiny_store: Path) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/embed", {"inputs": "the king of the city"}),  # 7 tokens each
        ("/fill-mask", {"inputs": "the [MASK] of the city"}),
        ("/nsp", {"inputs": {"text": "the king", "next": "of city"}}),
        ("/fill-mask", {"inputs": "[MASK] [MASK] of the [MASK]", "parameters": {"top_k": 9}}),
        (
            "/fill-mask",
            {"inputs": "a b c d [MASK]", "parameters": {"targets": ["moon", "sun", "king"]}},
        ),
    ]
    with watched(tiny_store, "bert") as (client, engine, waiting):
        send_together(client, engine, waiting, 7 * len(requests), requests)
        assert [len(batch) for batch in engine.batches] == [1, len(requests)]
