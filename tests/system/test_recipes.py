"""The recipes of docs/clients.md whose released packages can run here, against the default models.

`test_recipes.py` of tests/http replays what the other databases and tools send.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.support.released_clients import CLIENTS, QUIET, environment, printed, run
from tests.support.serving import Server, running_server

TEXTS = ["The king was dead.", "The old king died.", "The moon was red."]
SENT = json.dumps(TEXTS)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(DEFAULT_ROOT, "--precision", "fp32", CLOZE_MODEL="cloze-bert") as server:
        yield server


@pytest.fixture(scope="module")
def vectors(server: Server) -> np.ndarray:
    return np.array(httpx.post(f"{server.url}/embed", json={"inputs": TEXTS}).json())


def test_kserve(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    found = run("kserve_v2.py", "kserve.txt", folder, server.url, "cloze-bert.embed", SENT)
    assert all(found[state] for state in ("live", "ready", "model ready"))
    assert not found["unknown ready"]
    for form in ("json", "binary"):
        np.testing.assert_allclose(found[form], vectors, atol=1e-5, err_msg=form)
    assert found["warning"] == "ignored unknown fields: inputs.parameters.mine, parameters.mine"
    assert found["error"][0] == 404
    assert "nobody" in found["error"][1]


def test_codecs_of_mlserver(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    found = run("mlserver_codecs.py", "mlserver.txt", tmp_path / "environment", server.url, SENT)
    for codec in ("str", "base64"):
        np.testing.assert_allclose(found[codec], vectors, atol=1e-5, err_msg=codec)
    assert len(found["words"]) == 5


def test_databases(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    found = run("databases.py", "databases.txt", tmp_path / "environment", server.url, SENT)
    order = np.argsort(-vectors @ vectors[1]).tolist()
    assert [number for number, _ in found["qdrant"]] == found["chroma"] == order
    assert [score for _, score in found["qdrant"]] == pytest.approx(
        sorted((vectors @ vectors[1]).tolist(), reverse=True), abs=1e-5
    )


def test_semantic_kernel(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    found = run("semantic_kernel_embedding.py", "semantic_kernel.txt", folder, server.url, SENT)
    np.testing.assert_allclose(found["vectors"], vectors, atol=1e-5)


def test_java(server: Server, vectors: np.ndarray) -> None:
    if shutil.which("javac") is None:
        pytest.skip("no JDK is installed (Debian's package default-jdk-headless)")
    body = json.dumps({"model": "cloze-bert", "input": TEXTS, "encoding_format": "float"})
    program = str(CLIENTS / "Embed.java")
    found = printed(["java", program, f"{server.url}/v1/embeddings", body])
    np.testing.assert_allclose([row["embedding"] for row in found["data"]], vectors, atol=1e-5)


def test_litellm_as_a_proxy(server: Server, vectors: np.ndarray, tmp_path: Path) -> None:
    """The proxy of the recipe, as clients see it."""
    scripts = environment("litellm.txt", tmp_path / "environment")
    models = {
        "bert": {"model": "openai/cloze-bert", "api_base": f"{server.url}/v1"},
        "ranker": {"model": "cohere/cloze-bert", "api_base": f"{server.url}/v2/rerank"},
    }
    rows = [
        {"model_name": name, "litellm_params": parameters | {"api_key": "none"}}
        for name, parameters in models.items()
    ]
    (tmp_path / "config.yaml").write_text(json.dumps({"model_list": rows}))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [scripts / "litellm", "--config", "config.yaml", "--host", "127.0.0.1"]
    key = f"sk-{secrets.token_hex(32)}"  # the proxy starts with no weaker one
    options = QUIET | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    with (tmp_path / "log").open("w") as log:
        proxy = subprocess.Popen(
            [*command, "--port", port],
            cwd=tmp_path,
            env=os.environ | options,
            stdout=log,
            stderr=log,
        )
    try:
        transport = httpx.HTTPTransport(retries=10)  # until the proxy listens, up to 4 minutes
        url = f"http://127.0.0.1:{port}"
        sent = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=url, headers=sent, timeout=60, transport=transport) as client:
            answer = client.post("/v1/embeddings", json={"model": "bert", "input": TEXTS})
            assert answer.status_code == 200, answer.text
            found = [row["embedding"] for row in answer.json()["data"]]
            np.testing.assert_allclose(found, vectors, atol=1e-5)
            ranked = {"model": "ranker", "query": TEXTS[1], "documents": TEXTS}
            answer = client.post("/v1/rerank", json=ranked)
            assert answer.status_code == 200, answer.text
            order = np.argsort(-vectors @ vectors[1]).tolist()
            assert [row["index"] for row in answer.json()["results"]] == order
    finally:
        proxy.terminate()
        proxy.wait(30)
