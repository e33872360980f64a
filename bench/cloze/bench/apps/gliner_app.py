"""A FastAPI application around the library gliner, in the library's own environment.

One thread answers all requests that wait, up to 16, in one batch of the library, as gliner.serve
does. Requests of a batch need the same labels; those of the benchmark have them.

    python gliner_app.py CHECKPOINT {torch|torch-int8|onnx|onnx-int8} PORT
"""

import queue
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from gliner import GLiNER
from pydantic import BaseModel

BATCH = 16
FILES = {"onnx": "model.onnx", "onnx-int8": "model_quantized.onnx"}


class Parameters(BaseModel):
    """What to find."""

    labels: list[str]
    threshold: float = 0.5


class Inputs(BaseModel):
    """The body of a request: one text."""

    inputs: str
    parameters: Parameters


def load(checkpoint: str, backend: str) -> GLiNER:
    """Return the model; the first time, the library exports it."""
    if backend.startswith("torch"):
        quantize = "int8" if backend == "torch-int8" else None
        return GLiNER.from_pretrained(checkpoint, local_files_only=True, quantize=quantize)
    if not (Path(checkpoint) / FILES[backend]).exists():
        plain = GLiNER.from_pretrained(checkpoint, local_files_only=True)
        plain.export_to_onnx(checkpoint, quantize=True)
    return GLiNER.from_pretrained(
        checkpoint, local_files_only=True, load_onnx_model=True, onnx_model_file=FILES[backend]
    )


def make_app(checkpoint: str, backend: str) -> FastAPI:
    """Return the application."""
    app, model = FastAPI(), load(checkpoint, backend)
    waiting: queue.Queue[tuple[Inputs, Future[Any]]] = queue.Queue()

    def answer() -> None:
        while True:
            batch = [waiting.get()]
            while len(batch) < BATCH and not waiting.empty():
                batch.append(waiting.get())
            asked = batch[0][0].parameters
            found = model.inference(
                [body.inputs for body, _ in batch],
                asked.labels,
                threshold=asked.threshold,
                batch_size=BATCH,
            )
            for (_, future), entities in zip(batch, found, strict=True):
                future.set_result(entities)

    @app.post("/entities")
    def entities(body: Inputs) -> Any:
        future: Future[Any] = Future()
        waiting.put((body, future))
        return future.result()

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "alive"}

    threading.Thread(target=answer, daemon=True).start()
    return app


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[1], sys.argv[2]), port=int(sys.argv[3]), log_level="warning")
