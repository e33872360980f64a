"""A FastAPI application around sentence-transformers, with each of its backends."""

from collections.abc import Mapping

from cloze.bench.peers.peer import APPS, OFFLINE, Peer, PeerModel, package_versions
from cloze.bench.servers import MeasuredServer

_TITLE = "sentence-transformers"

BACKENDS = {
    "torch": (),
    "onnx": ("optimum", "onnxruntime"),
    "openvino": ("optimum-intel", "openvino"),
}
"""The backends, and the packages that each needs beside sentence-transformers."""


def _servers(python: str, model: PeerModel) -> list[MeasuredServer]:
    app = str(APPS / "sentence_transformers_app.py")
    return [
        MeasuredServer(
            f"FastAPI + {_TITLE} {backend}",
            (python, app, str(model.checkpoint), backend, "{port}"),
            "/embed",
            "/healthz",
            environment=OFFLINE,
        )
        for backend in model.backends
    ]


def _versions(python: str, model: PeerModel) -> Mapping[str, str]:
    extra = [package for backend in model.backends for package in BACKENDS[backend]]
    return package_versions(python, _TITLE, (_TITLE, "fastapi", "uvicorn", *extra))


PEER = Peer("sentence-transformers", "PYTHON", _TITLE, frozenset({"embed"}), _servers, _versions)
