"""Aliases: other names of models, on every protocol, for every key, and after a reload."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cloze.export.publish import export
from cloze.model_store import Store
from cloze.service.errors import ReloadRefused
from cloze.service.http.keys import Keys
from cloze.service.http.record import Callers
from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.support.fake_engine import FakeEngine
from tests.support.route_service import Service

EMBEDDER = {"name": "small", "version": 1, "tasks": ("embed",), "heads": {}}
ALIAS = "text-embedding-3-small"
ALIASES = {ALIAS: "small", "bge:v1": "tiny@2", "newest": "tiny", "third": "tiny@3"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("bundle")
    keys, digest = folder / "keys.toml", hashlib.sha256(b"secret").hexdigest()
    entry = f'sha256 = "{digest}"\nscopes = ["inference"]\nmodels = ["small", "tiny@2"]\n'
    keys.write_text(f"[team]\n{entry}")
    models = ({}, EMBEDDER, {"version": 2})
    with Service(folder, models, callers=Callers(Keys(keys)), aliases=ALIASES) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "the"}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        ("/rerank", {"query": "a", "texts": ["b"]}),
        ("/tokenize", {"inputs": "the"}),
        ("/", {"inputs": "the"}),
        ("/v1/embeddings", {"input": "the"}),
        ("/v1/embed", {"texts": ["the"]}),
        ("/v2/embed", {"texts": ["the"]}),
        ("/api/embed", {"input": "the"}),
        ("/api/embeddings", {"prompt": "the"}),
        ("/api/show", {}),
        ("/v2/models/ALIAS.embed/infer", {
            "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["the"]}]
        }),
    ],
)  # fmt: skip
def test_a_model_answers_to_its_aliases(service: Service, path: str, body: dict[str, Any]) -> None:
    sent = body if "ALIAS" in path else body | {"model": ALIAS}
    for headers in ({}, {"authorization": "Bearer secret"}):
        response = service.post(path.replace("ALIAS", ALIAS), sent, **headers)
        assert response.status_code == 200, response.text
        assert service.seen.model == ("" if path == "/api/show" else "small@1")


def test_aliases_are_listed(service: Service) -> None:
    rows = service.get("/v1/models").json()["data"]
    names = ["tiny@3", "tiny", "newest", "third", "small@1", "small", ALIAS, "tiny@2", "bge:v1"]
    assert [row["id"] for row in rows] == names
    described = service.get("/info").json()["models"]
    assert [model["aliases"] for model in described] == [["newest", "third"], [ALIAS], ["bge:v1"]]
    assert service.get("/v1/models/bge:v1").json()["id"] == "tiny@2"
    refused = service.post("/v1/embeddings", {"input": "a", "model": "gpt"})
    assert refused.status_code == 404
    assert all(name in refused.json()["error"]["message"] for name in names)


def test_a_key_has_the_aliases_of_its_models(service: Service) -> None:
    headers = {"authorization": "Bearer secret"}
    rows = service.get("/v1/models", **headers).json()["data"]
    names = ["small@1", "small", ALIAS, "tiny@2", "tiny", "bge:v1", "newest"]
    assert [row["id"] for row in rows] == names
    body = {"input": "the", "model": "third"}  # of tiny@3, which the key does not name
    assert service.post("/v1/embeddings", body, **headers).status_code == 404
    assert service.post("/v1/embeddings", body).status_code == 200


@pytest.mark.usefixtures("no_variables")
def test_a_reload_keeps_aliases_or_is_refused(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    store = Store(tmp_path)
    export(str(checkpoints["distilbert"]), "own", store)
    settings = load_settings({"model_store": tmp_path, "alias": (f"{ALIAS}=own", "org/next=own@1")})
    service = single_process(settings, lambda *_: FakeEngine())
    with TestClient(service, base_url="http://localhost") as client:
        assert client.get(f"/v1/models/{ALIAS}").json()["id"] == "own@1"
        client.portal.call(service.reload)
        assert client.get("/v1/models/org%2Fnext").json()["id"] == "own@1"
        export(str(checkpoints["distilbert"]), "own", store)
        client.portal.call(service._alone.wait)
        with pytest.raises(ReloadRefused, match="alias org/next: no model 'own@1' is served"):
            client.portal.call(service.reload)
        assert client.get(f"/v1/models/{ALIAS}").json()["id"] == "own@1"
