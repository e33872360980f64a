"""A FastAPI application around a transformers pipeline, which users often write themselves."""

from cloze.bench.peers.peer import APPS, OFFLINE, Peer, PeerModel, package_versions
from cloze.bench.servers import MeasuredServer

_TITLE = "a transformers pipeline"


def _servers(python: str, model: PeerModel) -> list[MeasuredServer]:
    app = str(APPS / "pipeline_app.py")
    return [
        MeasuredServer(
            "FastAPI + transformers",
            (python, app, str(model.checkpoint), model.task, "{port}"),
            f"/{model.task}",
            "/healthz",
            environment=OFFLINE,
            max_texts=1,
        )
    ]


PEER = Peer(
    "pipeline",
    "PYTHON",
    _TITLE,
    frozenset({"embed", "fill-mask"}),
    _servers,
    lambda python, _: package_versions(
        python, _TITLE, ("transformers", "torch", "fastapi", "uvicorn")
    ),
)
