"""infinity-emb in its own environment, with torch, and with onnxruntime if it can."""

from collections.abc import Mapping
from pathlib import Path

from cloze.bench.peers.peer import OFFLINE, Peer, PeerModel, package_versions
from cloze.bench.servers import MeasuredServer

_TITLE = "infinity-emb"

_ENGINES = {"torch": "--no-bettertransformer", "optimum": "--onnx-do-not-prefer-quantized"}
"""The engines, and an option of each."""


def _servers(python: str, model: PeerModel) -> list[MeasuredServer]:
    has_graph = (model.checkpoint / "onnx" / "model.onnx").is_file()
    if has_graph and "optimum" in _versions(python, model):
        return [_server(python, model, engine) for engine in _ENGINES]
    return [_server(python, model, "torch")]


def _server(python: str, model: PeerModel, engine: str) -> MeasuredServer:
    options = {
        "--model-id": str(model.checkpoint),
        "--served-model-name": "m",
        "--engine": engine,
        "--device": "cpu",
        "--port": "{port}",
    }
    arguments = [part for option in options.items() for part in option]
    return MeasuredServer(
        f"{_TITLE} {engine}",
        (str(Path(python).parent / "infinity_emb"), "v2", *arguments, _ENGINES[engine]),
        "/embeddings",
        "/health",
        field="input",
        extra={"model": "m"},
        environment=OFFLINE | {"INFINITY_ANONYMOUS_USAGE_STATS": "0"},
    )


def _versions(python: str, _: PeerModel) -> Mapping[str, str]:
    return package_versions(python, _TITLE, (_TITLE,))


PEER = Peer("infinity", "PYTHON", _TITLE, frozenset({"embed"}), _servers, _versions)
