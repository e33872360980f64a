"""The name of a vector space, and the roles of texts: what changes the name, and where it stands."""

import base64
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from sentence_transformers.util.quantization import quantize_embeddings

from cloze.cli import cli
from cloze.client import Client, RequestRefused
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.embedding_space import embedding_space, own_recipe
from cloze.model_store.manifest import Manifest
from tests.support.refusals import error_of
from tests.support.released_clients import run
from tests.support.sentence_folders import saved
from tests.support.serving import Server, running_server
from tests.support.task_model import manifest

PROMPTS = {"query": "ask : ", "passage": "the : "}
HEADER, EXPECTED = "x-embedding-space", "x-expect-embedding-space"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    after = (Pooling(64), Dense(64, 48), Normalize())
    return saved(tmp_path_factory.mktemp("sentence"), "bert-plain", *after, prompts=PROMPTS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    root = tmp_path_factory.mktemp("store")
    exported(checkpoint, root, name="roles")
    return root


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with running_server(store, "--precision", "fp32") as server:
        yield server


def exported(checkpoint: Path, root: Path, name: str = "one", **options: Any) -> Manifest:
    made = ExportOptions(tasks=("embed",), **options)
    return export(str(checkpoint), name, Store(root), made).manifest


def space(described: Manifest, precision: str = "fp32", **changes: Any) -> str | None:
    recipe = own_recipe(described)
    return embedding_space(described, precision, replace(recipe, **changes))


def test_a_name_and_another_export_leave_the_space(
    checkpoint: Path, store: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(checkpoint, tmp_path / "under another name")
    card = copied / "README.md"
    card.write_text("another card")
    settings = json.loads((copied / "config.json").read_text())
    settings |= {"transformers_version": "9.9", "_name_or_path": "elsewhere", "use_cache": False}
    settings |= {"hidden_dropout_prob": 0.25}  # of training
    (copied / "config.json").write_text(json.dumps(settings))
    for _ in range(2):
        other = exported(copied, tmp_path / "store", name="other")
    assert other.version == 2
    assert space(other) == space(Store(store).manifest("roles"))


def test_the_name_is_that_of_every_release() -> None:
    """Another value here means that each user has to embed each corpus again."""
    assert space(manifest()) == "0ce7ca3b2bbeaf13"


def test_a_bundle_that_does_not_say_enough_has_no_name() -> None:
    described = manifest()
    projected = described.embedding.model_copy(update={"projected": True})
    assert space(described.model_copy(update={"embedding": projected})) is None
    assert space(described, "") is None, "no engine runs"


TENSOR = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
ASKING: list[tuple[str, dict[str, Any]]] = [
    ("/embed", {"inputs": "a"}),
    ("/", {"inputs": "a"}),
    ("/v1/embeddings", {"input": "a", "model": "MODEL"}),
    ("/embeddings", {"input": "a", "model": "MODEL"}),
    ("/v2/models/MODEL.embed/infer", {"inputs": [TENSOR]}),
    ("/v2/embed", {"texts": ["a"], "model": "MODEL", "input_type": "document"}),
]


def asked(server: Server, model: str, path: str, body: Any, **headers: str) -> httpx.Response:
    named = json.loads(json.dumps([path, body]).replace("MODEL", model))
    return httpx.post(server.url + named[0], json=named[1], headers=headers)


@pytest.mark.parametrize(("path", "body"), ASKING)
def test_every_protocol_names_the_space_and_refuses_another(
    server: Server, store: Path, path: str, body: dict[str, Any]
) -> None:
    own = space(Store(store).manifest("roles"))
    answer = asked(server, "roles", path, body, **{EXPECTED: str(own)})
    assert (answer.status_code, answer.headers[HEADER]) == (200, own)
    refused = asked(server, "roles", path, body, **{EXPECTED: "0123456789abcdef"})
    assert error_of(refused) == (412, "other_embedding_space")


def test_answers_of_several_processes_and_other_vectors_name_the_space(
    every_task: Server, store: Path
) -> None:
    names = {
        httpx.post(every_task.url + path, json={"inputs": "the king"}).headers[HEADER]
        for path in ("/embed", "/embed_all", "/embed_sparse")
    }
    assert len(names) == 3, "vectors of texts, of tokens and of words share no index"
    pair = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
    answer = httpx.post(f"{every_task.url}/similarity", json=pair, headers={EXPECTED: "x"})
    assert (answer.status_code, HEADER in answer.headers) == (200, False)
    with running_server(store, "--precision", "fp32", "--frontends", "1") as server:
        answer = asked(server, "roles", *ASKING[0])
        assert answer.headers[HEADER] == space(Store(store).manifest("roles"))


def test_models_and_clients_name_the_space(server: Server, store: Path) -> None:
    own = space(Store(store).manifest("roles"))
    [model] = httpx.get(f"{server.url}/info").json()["models"]
    rows = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert {model["embedding_space"], *(row["embedding_space"] for row in rows)} == {own}
    shown = CliRunner().invoke(cli, ["store", "show", "roles", "--model-store", str(store)])
    assert json.loads(shown.output)["embedding_spaces"]["embed"]["fp32"] == own

    with Client(server.url, batch_size=1) as client:
        vectors = client.embed(["a", "b"])
        assert (vectors.embedding_space, type(vectors + 1)) == (own, np.ndarray)
        with pytest.raises(RequestRefused, match="412"):
            client.embed("a", expect_embedding_space="another")
        assert client.embed("a", expect_embedding_space=own).shape == (1, 48)


@pytest.mark.parametrize(("word", "role"), [
    ("query", "query"), ("retrieval.query", "query"), ("search_document", "document"), ("passage", "document"),
])  # fmt: skip
def test_roles_choose_the_prompts_of_sentence_transformers(
    server: Server, checkpoint: Path, word: str, role: str
) -> None:
    theirs = SentenceTransformer(str(checkpoint), device="cpu")
    encode = theirs.encode_query if role == "query" else theirs.encode_document
    body = {"input": ["the king"], "model": "roles", "input_type": word}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body)
    [row] = answer.json()["data"]
    np.testing.assert_allclose(row["embedding"], encode(["the king"])[0], atol=1e-4)
    [model] = httpx.get(f"{server.url}/info").json()["models"]
    assert model["roles"]["change_vectors"] is True
    assert model["roles"][role]["embedding_space"] == answer.headers[HEADER]
    native = httpx.post(f"{server.url}/embed", json={"inputs": "the king", "input_type": word})
    np.testing.assert_allclose(native.json()[0], row["embedding"], atol=1e-6)


RAISED = {
    "voyage": "voyageai.error.InvalidRequestError",
    "nvidia": "builtins.Exception: [400]",
    "jina": "builtins.RuntimeError",
    "cohere": "cohere.errors.bad_request_error.BadRequestError",
}
"""What each client raises for a role, and for a long text, that the server refuses."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_released_clients_choose_roles(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    """Those of Voyage, NVIDIA, Jina and Cohere; the test skips if it cannot install them."""
    text, long_text = "the king", "of " * 80 + "the king"
    environment = tmp_path / "environment"
    found = run("roles.py", "roles.txt", environment, server.url, "roles", text, long_text)
    theirs = SentenceTransformer(str(checkpoint), device="cpu")
    vectors = {
        "query": theirs.encode_query([text])[0],
        "document": theirs.encode_document([text])[0],
        "without": theirs.encode([text])[0],
    }
    assert np.abs(vectors["query"] - vectors["document"]).max() > 0.01
    for client, raised in RAISED.items():
        assert {"query", "document", "short"} <= found[client].keys()
        for name, value in found[client].items():
            if name in vectors:
                np.testing.assert_allclose(value, vectors[name], atol=1e-4, err_msg=client)
            elif name in ("unknown", "long"):
                assert value.startswith(raised)
        short = vectors["query"][:8] / np.linalg.norm(vectors["query"][:8])
        np.testing.assert_allclose(found[client]["short"], short, atol=1e-4, err_msg=client)
    np.testing.assert_allclose(found["nvidia"]["cut"], found["cohere"]["cut"], atol=1e-6)
    kinds = found["cohere types"]
    exact = np.frombuffer(base64.b64decode(kinds["base64"]), "<f4")
    np.testing.assert_allclose(exact, vectors["query"], atol=1e-4)
    for kind in ("binary", "ubinary"):
        assert kinds[kind] == quantize_embeddings(exact[None], kind)[0].tolist()
    answered, tokens, identity = found["cohere answer"]
    assert (answered, tokens, len(identity)) == ([text], 6, 16)


def test_a_ranking_by_embeddings_uses_both_roles(server: Server, checkpoint: Path) -> None:
    texts = ["the king", "of Paris", "a moon over the sea"]
    theirs = SentenceTransformer(str(checkpoint), device="cpu")
    cosines = theirs.encode_document(texts) @ theirs.encode_query(["moon"])[0]
    ranks = httpx.post(f"{server.url}/rerank", json={"query": "moon", "texts": texts}).json()
    scores = [rank["score"] for rank in sorted(ranks, key=lambda rank: rank["index"])]
    np.testing.assert_allclose(scores, cosines, atol=1e-4)
