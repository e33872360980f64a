"""A usual FastAPI application around a transformers pipeline.

The application serves one model. Each request runs alone on a thread, without batching.

    python pipeline_app.py CHECKPOINT {embed|fill-mask} PORT
"""

import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModel, AutoTokenizer, pipeline


class Inputs(BaseModel):
    """The body of a request: one text."""

    inputs: str


def make_app(checkpoint: str, task: str) -> FastAPI:
    """Return the application for one task."""
    app = FastAPI()
    if task == "fill-mask":
        fill = pipeline("fill-mask", model=checkpoint)

        @app.post("/fill-mask")
        def fill_mask(body: Inputs) -> Any:
            return fill(body.inputs, tokenizer_kwargs={"truncation": True})
    else:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        model = AutoModel.from_pretrained(checkpoint).eval()

        @app.post("/embed")
        def embed(body: Inputs) -> Any:
            encoded = tokenizer(body.inputs, truncation=True, return_tensors="pt")
            with torch.inference_mode():
                hidden = model(**encoded).last_hidden_state  # [1, S, H]
            return torch.nn.functional.normalize(hidden.mean(1), dim=-1).tolist()

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "alive"}

    return app


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[1], sys.argv[2]), port=int(sys.argv[3]), log_level="warning")
