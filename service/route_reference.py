"""Writes `docs/routes.md`: every route, with its protocols, its clients, and what differs.

python -m cloze.service.route_reference > docs/routes.md
"""

import sys
from dataclasses import dataclass
from typing import Final

from cloze.service.app import DEFAULT_REGISTRIES, Process, Service
from cloze.service.metrics import Metrics
from cloze.service.settings import Settings
from cloze.service.tasks import (
    embed,
    embed_all,
    embed_sparse,
    fill_mask,
    qa,
    similarity,
    text_classification,
    token_classification,
)

_INTRODUCTION = """\
# Routes and clients

<!-- Generated: python -m cloze.service.route_reference > docs/routes.md -->

This page is generated from the routes and from `service/route_reference.py`. Do not edit the page.
`cloze.client` has a method for every task. "Differs" compares with the protocol's own server; the
whole list for text-embeddings-inference is in
[clients](clients.md#coming-from-text-embeddings-inference), and each field is in [the API](api.md).

| route | answer | protocol | released clients | differs |
|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class _Use:
    """The protocols that have a route, the released clients that tests send there, differences."""

    protocols: str
    clients: str = ""
    differs: str = ""


_HUB, _TEI, _OPENAI = "Hugging Face", "text-embeddings-inference", "OpenAI"
_HUB_CLIENTS = "huggingface_hub, @huggingface/inference"
_OPEN, _TRITON = "Open Inference", "tritonclient"

_OURS: Final = _Use("Cloze")


def _both(method: str, rest: str, use: _Use) -> dict[str, _Use]:
    """Return the use of a route of a model, with and without a version."""
    paths = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    return {f"{method} {path}{rest}": use for path in paths}


USES: Final = {
    f"POST {fill_mask.TASK.route}": _Use(_HUB, _HUB_CLIENTS),
    f"POST {embed.TASK.route}": _Use(
        f"{_HUB}, {_TEI}",
        f"{_HUB_CLIENTS}, LlamaIndex, Haystack",
        "token ids get [CLS] and [SEP] unless they have them; 2,048 texts instead of 32",
    ),
    f"POST {embed_all.TASK.route}": _Use(
        _TEI, "", "the model needs a head for token vectors, else 424"
    ),
    f"POST {embed_sparse.TASK.route}": _Use(
        _TEI, "", "`top_k` and `return_tokens` are our own fields"
    ),
    f"POST {similarity.TASK.route}": _Use(f"{_HUB}, {_TEI}", "huggingface_hub"),
    f"POST {qa.TASK.route}": _Use(_HUB, "huggingface_hub"),
    f"POST {text_classification.TASK.route}": _Use(
        _HUB, "huggingface_hub", "all labels by default"
    ),
    f"POST {token_classification.TASK.route}": _Use(_HUB, "huggingface_hub"),
    "POST /": _Use(
        f"{_HUB}, {_TEI}",
        f"{_HUB_CLIENTS}, LangChain",
        "the body chooses the task; text-embeddings-inference has one per server",
    ),
    "GET /v2": _Use(_OPEN, _TRITON, "one extension: binary tensors"),
    "GET /v2/health/live": _Use(_OPEN, _TRITON),
    "GET /v2/health/ready": _Use(_OPEN, _TRITON),
    "GET /v2/models": _Use("KServe"),
    **_both("GET", "", _Use(_OPEN, _TRITON)),
    **_both("GET", "/ready", _Use(_OPEN, _TRITON)),
    **_both("POST", "/infer", _Use(_OPEN, _TRITON, "inputs are texts; 400 also for 422")),
    "POST /rerank": _Use(
        _TEI,
        "LlamaIndex, Haystack",
        "without a classifier of one label, the similarity of embeddings ranks; `x-ranked-by` "
        "says which",
    ),
    "POST /predict": _Use(_TEI, "", "the checkpoint's `problem_type` chooses the function"),
    "POST /tokenize": _Use(_TEI),
    "POST /decode": _Use(_TEI),
    "POST /v1/embeddings": _Use(
        f"{_OPENAI}, {_TEI}", "openai, LangChain", "token ids are those of the served model"
    ),
    "POST /embeddings": _Use(f"{_TEI}, Infinity", "", "as `/v1/embeddings`"),
    "GET /v1/models": _Use(_OPENAI, "openai"),
    "GET /v1/models/{model}": _Use(_OPENAI, "openai"),
    "GET /health": _Use(_TEI),
    "GET /info": _Use(_TEI, "", "the fields of the default model, and a list of all models"),
    "GET /metrics": _Use("Prometheus", "", "names of our own"),
}
"""How routes are used that are not only ours."""


def route_reference() -> str:
    """Return the text of `docs/routes.md`."""
    return _INTRODUCTION + "".join(
        f"| `{method} {path}` | {summary} | {use.protocols} | {use.clients} | {use.differs} |\n"
        for method, path, summary in routes()
        for use in (USES.get(f"{method} {path}", _OURS),)
    )


def routes() -> list[tuple[str, str, str]]:
    """Return the method, the path and the summary of every route of a server."""
    process = Process(Settings(), Metrics([], shared=False), DEFAULT_REGISTRIES, opener=None)
    service = Service(process, [])
    paths = service.api().openapi()["paths"]
    return [
        (method.upper(), path, operation["summary"])
        for path, operations in paths.items()
        for method, operation in operations.items()
    ]


if __name__ == "__main__":
    sys.stdout.write(route_reference())
