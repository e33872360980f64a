"""text-embeddings-inference, as a program for the CPU with its onnxruntime part."""

from cloze.bench.errors import BenchError
from cloze.bench.peers.peer import OFFLINE, Peer, PeerModel, binary_version
from cloze.bench.servers import MeasuredServer

_TITLE = "text-embeddings-inference"

_MAX_TEXTS = 32
"""Default limit of texts per request."""


def _servers(binary: str, model: PeerModel) -> list[MeasuredServer]:
    if not (model.checkpoint / "onnx" / "model.onnx").is_file():
        raise BenchError(
            f"{_TITLE} needs {model.checkpoint}/onnx/model.onnx; write it with "
            f"python -m cloze.bench.peers.plain_onnx {model.checkpoint}"
        )
    options = {
        "--model-id": str(model.checkpoint),
        "--port": "{port}",
        "--hostname": "127.0.0.1",
        "--pooling": model.pooling,
    }
    command = (binary, *(part for option in options.items() for part in option))
    return [
        MeasuredServer(
            _TITLE, command, "/embed", "/health", environment=OFFLINE, max_texts=_MAX_TEXTS
        )
    ]


PEER = Peer(
    "tei",
    "BINARY",
    _TITLE,
    frozenset({"embed"}),
    _servers,
    lambda binary, _: binary_version(binary, _TITLE),
)
