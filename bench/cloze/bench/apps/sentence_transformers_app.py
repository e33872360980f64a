"""A usual FastAPI application around sentence-transformers, in its own environment.

Each request runs alone on a thread, without batching of several requests.

    python sentence_transformers_app.py CHECKPOINT {torch|onnx|openvino} PORT
"""

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer


class Inputs(BaseModel):
    """The body of a request: one text or several."""

    inputs: str | list[str]


def make_app(checkpoint: str, backend: Any) -> FastAPI:
    """Return the application."""
    app = FastAPI()
    model = SentenceTransformer(checkpoint, backend=backend, device="cpu")

    @app.post("/embed")
    def embed(body: Inputs) -> Any:
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        return model.encode(texts, show_progress_bar=False).tolist()

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "alive"}

    return app


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[1], sys.argv[2]), port=int(sys.argv[3]), log_level="warning")
