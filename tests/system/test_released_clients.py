"""Released clients whose requirements contradict ours: each runs in an environment of its own.

The programs in tests/clients call a server; their versions are locked there. Where an environment
cannot be installed, the test skips and says why.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from cloze.export.publish import export
from cloze.model_store import Store
from tests.support.family_checkpoints import reranker
from tests.support.released_clients import CLIENTS, install, printed, run
from tests.support.serving import Server, running_server

TEXTS = ["the king", "the old king", "a moon over the sea"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tiny_store: Path) -> Iterator[Server]:
    with running_server(tiny_store) as server:
        yield server


@pytest.fixture(scope="module")
def vectors(server: Server) -> np.ndarray:
    return np.array(httpx.post(f"{server.url}/embed", json={"inputs": TEXTS}).json())


def cosines(vectors: np.ndarray) -> list[float]:
    """Of the first text with each, best first."""
    return sorted((vectors @ vectors[0]).tolist(), reverse=True)


def test_langchain_and_llama_index(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    found = run(
        "langchain_and_llama_index.py",
        "langchain.txt",
        tmp_path / "environment",
        server.url,
        "bert",
        json.dumps(TEXTS),
    )
    for name in ("openai documents", "hub documents", "llama texts"):
        np.testing.assert_allclose(found[name], vectors, atol=1e-5, err_msg=name)
    queries = ("openai query", "openai asynchronous", "hub query", "llama query")
    for name in (*queries, "llama asynchronous"):
        np.testing.assert_allclose(found[name], vectors[0], atol=1e-5, err_msg=name)
    assert found["openai error"] == "openai.BadRequestError"
    assert found["hub error"] == "huggingface_hub.errors.BadRequestError"
    assert [index for index, _ in found["llama ranks"]] == [0, 1, 2]
    assert [score for _, score in found["llama ranks"]] == pytest.approx(cosines(vectors), abs=1e-5)


def test_clients_of_cohere_jina_ollama_and_others(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "CHROMA_COHERE_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "1",
    }.items():
        monkeypatch.setenv(name, value)
    aliases = "an/alias:v1=bert,embed-english-v3.0=bert@1"
    with running_server(tiny_store, CLOZE_ALIAS=aliases) as server:
        monkeypatch.setenv("CO_API_URL", server.url)
        expected = httpx.post(f"{server.url}/embed", json={"inputs": TEXTS, "model": "bert"}).json()
        found = run(
            "embedders.py", "embedders.txt", tmp_path / "environment", server.url, json.dumps(TEXTS)
        )
    assert len(found["vectors"]) == 24
    for name, rows in found["vectors"].items():
        np.testing.assert_allclose(rows, expected, atol=1e-5, err_msg=name)
    late = np.array(found["late"])
    np.testing.assert_allclose(late[0], late[1], atol=1e-6)
    assert late.shape == (2, *np.shape(expected))
    assert abs(late[0] - expected).max() > 1e-3
    np.testing.assert_array_equal(found["signs"], np.array(expected) > 0)
    assert {"bert:latest", "an/alias:v1"} <= {*found["listed"]}
    assert found["shown"] == ["embedding"]
    ollama_error, no_route, no_images, mistral_error = found["errors"]
    assert "(status code: 404)" in ollama_error
    assert "there is no route '/api/chat'" in no_route
    assert no_images.startswith("cohere.errors.bad_request_error.BadRequestError")
    assert "no model 'nobody' is served" in mistral_error


def test_haystack(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    found = run(
        "haystack_components.py",
        "haystack.txt",
        tmp_path / "environment",
        server.url,
        json.dumps(TEXTS),
    )
    np.testing.assert_allclose(found["text"], vectors[0], atol=1e-5)
    np.testing.assert_allclose(found["documents"], vectors, atol=1e-5)
    assert [score for _, score in found["ranks"]] == pytest.approx(cosines(vectors), abs=1e-5)
    assert found["error"] == "huggingface_hub.errors.BadRequestError"
    assert found["rank error"] == "builtins.RuntimeError"  # Haystack wraps all errors of its ranker


def test_tritonclient(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    address = server.url.removeprefix("http://")
    found = run("triton.py", "triton.txt", tmp_path / "environment", address, json.dumps(TEXTS))
    assert all(found[state] for state in ("live", "ready", "model ready"))
    assert not found["unknown ready"]
    assert found["server"]["name"] == "cloze"
    assert [tensor["name"] for tensor in found["model"]["inputs"]] == ["question", "context"]
    for form in ("binary", "json", "compressed", "version"):
        np.testing.assert_allclose(found[form], vectors, atol=1e-5, err_msg=form)
    body = {"inputs": {"question": "who?", "context": "the king"}}
    answer = httpx.post(f"{server.url}/qa", json=body).json()
    assert [json.loads(result) for result in found["qa"]["result"]] == [answer]
    assert found["qa"]["answer"] == [answer["answer"]]
    assert found["qa"]["score"] == pytest.approx([answer["score"]])
    assert found["fill-mask"]["count"] == [2, 4]
    assert len(found["fill-mask"]["token_str"]) == 6
    pairs = [{"text": text, "next": text} for text in TEXTS]
    for row, labels in zip(
        found["classes"],
        httpx.post(f"{server.url}/nsp", json={"inputs": pairs}).json(),
        strict=True,
    ):
        score, number, label = row.split(":")
        best = max(labels, key=lambda each: each["score"])
        assert (label, int(number)) == (best["label"], labels.index(best))
        assert float(score) == pytest.approx(best["score"], abs=1e-5)
    assert found["error"][0] == "404"
    assert "bert.nothing" in found["error"][1]


def test_kserve_version_1(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    arguments = (server.url, "bert", json.dumps(TEXTS))
    found = run("kserve_v1.py", "kserve.txt", tmp_path / "environment", *arguments)
    assert (found["ready"], found["live"]) == (True, True)
    np.testing.assert_allclose(found["vectors"], vectors[:, None], atol=1e-5)
    body = {"inputs": "the [MASK]", "parameters": {"top_k": 2}}
    assert found["masks"] == [httpx.post(f"{server.url}/fill-mask", json=body).json()]
    status, message = found["error of bert"]
    assert (status, message.split(",")[0]) == (422, 'instances[1] has no field "inputs"')
    status, message = found["error of nobody"]
    assert status == 404
    assert message.startswith("no model 'nobody' is served")


def test_huggingface_inference(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed (Debian's packages nodejs and npm)")
    for name in ("package.json", "package-lock.json", "inference.mjs"):
        shutil.copy(CLIENTS / name, tmp_path)
    install("npm", "ci", "--silent", "--no-audit", "--no-fund", cwd=tmp_path)
    found = printed(["node", str(tmp_path / "inference.mjs"), server.url, TEXTS[0], TEXTS[1]])
    np.testing.assert_allclose(found["featureExtraction"], vectors[:1], atol=1e-5)
    np.testing.assert_allclose(found["byAddress"], vectors[:1], atol=1e-5)
    expected = [1.0, float(vectors[0] @ vectors[1])]
    assert found["sentenceSimilarity"] == pytest.approx(expected, abs=1e-5)
    assert len(found["fillMask"]) == 5
    assert found["questionAnswering"]["answer"]
    assert found["error"] == "InferenceClientProviderApiError"


def test_rerankers(tmp_path: Path) -> None:
    folder, store = tmp_path / "checkpoints", Store(tmp_path / "store")
    export(str(reranker("bert", folder / "one")), "rank", store)
    labels = {"id2label": {0: "bad", 1: "good"}}
    export(str(reranker("bert", folder / "two", **labels)), "classes", store)
    query, texts = "Where is the bank?", ["The bank charges a fee.", "Where?", "At the harbour."]
    with running_server(tmp_path / "store") as server:
        body = {"query": query, "texts": texts, "model": "rank"}
        expected, logits = (
            {
                row["index"]: row["score"]
                for row in httpx.post(f"{server.url}/rerank", json=b).json()
            }
            for b in (body, body | {"raw_scores": True})
        )
        arguments = (server.url, "rank", query, json.dumps(texts))
        found = run("rerankers.py", "rerankers.txt", tmp_path / "environment", *arguments)
    label, score = found.pop("infinity labels")[0]
    assert label in ("bad", "good")
    assert 0.5 <= score < 1
    assert found.pop("cohere error").startswith("cohere.errors.bad_request_error.BadRequestError")
    assert "documents[0] is empty" in found.pop("voyage error")
    for name, rows in found.items():
        by_index = logits if "nvidia" in name else expected
        assert isinstance(rows, list), (name, rows)
        assert [index for index, _ in rows] == [*expected], name
        assert dict(rows) == pytest.approx(by_index, abs=1e-5), name


def test_clients_for_node(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed (Debian's packages nodejs and npm)")
    folder = tmp_path / "node"
    shutil.copytree(CLIENTS / "node", folder)
    install("npm", "ci", "--silent", "--no-audit", "--no-fund", cwd=folder)
    sent = json.dumps(TEXTS)
    found = printed(["node", str(folder / "clients.mjs"), server.url, "bert", sent])
    assert len(found["vectors"]) == 14
    for name, rows in found["vectors"].items():
        is_single = any(word in name for word in ("single", "older", "query"))
        expected = vectors[:1] if is_single else vectors
        assert isinstance(rows, list), (name, rows)
        np.testing.assert_allclose(rows, expected, atol=1e-5, err_msg=name)
    for name, ranks in found["ranks"].items():
        assert isinstance(ranks, list), (name, ranks)
        assert [index for index, _ in ranks] == [0, 1, 2], name
        assert [score for _, score in ranks] == pytest.approx(cosines(vectors), abs=1e-5), name
    for name, names in found["models"].items():
        name_of = {"openai one": "bert@1", "ollama": "bert:latest", "ollama running": "bert:latest"}
        assert name_of.get(name, "bert") in names, (name, names)
    unknown = found["errors"].pop("openai route")
    assert unknown.startswith("NotFoundError 404 there is no route '/v1/chat/completions'")
    for name, error in found["errors"].items():
        assert "no model 'nobody' is served" in error, (name, error)
    assert found["others"]["ollama preload"] == []
    assert found["others"]["ollama show"] == ["embedding"]
    assert found["others"]["ollama version"]["version"]
