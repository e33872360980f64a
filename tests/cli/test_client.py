"""The Python client: results of every task, batches, retries and errors; and ``cloze ask``."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cloze.client import AsyncClient, Client, RequestRefused
from tests.support.command import cloze
from tests.support.serving import Server

TEXTS = ["the king", "a moon over the sea", "the old house", "red", "walk", "who was he?", "time"]


@pytest.fixture(scope="module")
def server(servers: Callable[[tuple[str, ...]], Server]) -> Server:
    return servers(())


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, batch_size=3) as client:
        yield client


def test_embeddings_are_an_array_whatever_the_batches(server: Server, client: Client) -> None:
    expected = httpx.post(f"{server.url}/embed", json={"inputs": TEXTS}).json()
    vectors = client.embed(TEXTS)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, np.array(expected, np.float32))
    assert client.embed("the king", dimensions=8, normalize=False).shape == (1, 8)
    tokens = client.embed_all(TEXTS)
    assert [rows.shape for rows in tokens[:2]] == [(4, 64), (11, 64)]
    cosines = client.similarity("the king", TEXTS)
    assert cosines[0] == pytest.approx(1, abs=1e-5)
    ranks = client.rerank("the king", TEXTS)
    assert [rank.index for rank in ranks] == np.argsort(-cosines, kind="stable").tolist()
    assert [rank.score for rank in ranks] == pytest.approx(sorted(cosines, reverse=True))


def test_vectors_travel_in_fewer_bytes(client: Client) -> None:
    texts = ["the king", "of Paris", "the moon"]
    exact = client.embed(texts)
    for dtype, tolerance in (("float16", 1e-3), ("int8", 0.01)):
        found = client.embed(texts, dtype=dtype)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, exact, atol=tolerance * np.abs(exact).max())
    signs = client.embed(texts, dtype="ubinary")
    np.testing.assert_array_equal(signs, np.packbits(exact > 0, axis=1))


def test_long_texts_are_a_choice(client: Client) -> None:
    long = "year " * 300
    divided = client.embed([long], long_text="window")
    assert not np.allclose(divided, client.embed([long]), atol=1e-4)
    with pytest.raises(RequestRefused, match="long_text is error"):
        client.embed([long], long_text="error")
    scored = client.score(long, long_text="window")[0]
    assert len(scored.tokens) == 300
    [masks] = client.fill_mask("[MASK] " + long, long_text="window", top_k=2)
    assert len(masks[0]) == 2


def test_masks_are_filled_per_text_and_mask(client: Client) -> None:
    found = client.fill_mask(["the [MASK]", "a [MASK] [MASK]", "[MASK]", "[MASK] he"], top_k=2)
    assert [[len(mask) for mask in masks] for masks in found] == [[2], [2, 2], [2], [2]]
    chosen = client.fill_mask("the [MASK]", targets=["moon", "king"])[0][0]
    assert {prediction.token_str for prediction in chosen} == {"moon", "king"}
    assert chosen[0].score >= chosen[1].score


def test_pairs_and_questions(server: Server, client: Client) -> None:
    pairs = [("the king", text) for text in TEXTS]
    body = {"inputs": [{"text": first, "next": second} for first, second in pairs]}
    expected = [labels[0]["score"] for labels in httpx.post(f"{server.url}/nsp", json=body).json()]
    assert client.nsp(pairs) == pytest.approx(np.array(expected), abs=1e-6)
    assert client.nsp(("the king", "red")).shape == (1,)
    context = "paris is the capital of france"
    answers = client.qa([("what is paris?", context)] * 4, top_k=2)
    assert [len(row) for row in answers] == [2] * 4
    best = client.qa(("what is paris?", context))[0][0]
    assert context[best.start : best.end] == best.answer
    assert best == answers[0][0]


@pytest.mark.anyio
async def test_the_asynchronous_client_gives_the_same(server: Server, client: Client) -> None:
    without_scheme = server.url.removeprefix("http://")
    async with AsyncClient(without_scheme, batch_size=2, progress=True) as other:
        np.testing.assert_array_equal(await other.embed(TEXTS), client.embed(TEXTS))
        ranks = await other.rerank("the king", TEXTS)
        assert [r.index for r in ranks] == [r.index for r in client.rerank("the king", TEXTS)]
        assert (await other.info())["defaults"] == client.info()["defaults"]
        with pytest.raises(RequestRefused, match=r"^400: inputs\[1\] is empty"):
            await other.embed(["a", "b", "c", "", "e", "f"])


def test_refusals_are_told(client: Client) -> None:
    for status, call in (
        (404, lambda: client.embed("a", model="nobody")),
        (422, lambda: client.fill_mask("no mask")),
        (424, lambda: client.classify("a")),
    ):
        with pytest.raises(RequestRefused) as caught:
            call()
        assert caught.value.status == status
        assert caught.value.request_id


def test_the_client_needs_neither_the_runtime_nor_the_server() -> None:
    program = "import sys, cloze.client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "httpx" in loaded
    assert not loaded & {"onnxruntime", "torch", "fastapi", "pydantic", "tokenizers", "tqdm"}


# ---- cloze ask -----------------------------------------------------------------------------------


def cloze_ask(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return cloze("ask", *arguments, **environment)


@pytest.mark.parametrize(
    ("arguments", "columns"),
    [
        (("score", "the king"), {"log_probability", "start", "token"}),
        (("embed-all", "the king"), {"token", "dimensions", "vector"}),
        (("qa", "who?", "the king"), {"score", "start", "end", "answer"}),
        (("rerank", "the king", "a moon", "red"), {"score", "index", "text"}),
    ],
)
def test_ask_knows_every_task(
    server: Server, arguments: tuple[str, ...], columns: set[str]
) -> None:
    done = cloze_ask(*arguments, "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[0].split()) == columns


def test_ask_prints_a_table_or_all_numbers_as_json(server: Server, client: Client) -> None:
    done = cloze_ask("fill-mask", "the [MASK]", "a [MASK] [MASK]", "--url", server.url)
    assert done.stdout.split()[:5] == ["text", "mask", "score", "token", "sequence"]
    row = json.loads(cloze_ask("embed", "the king", "--json", "--url", server.url).stdout)
    assert row["vector"] == pytest.approx(client.embed("the king")[0].tolist())
    table = cloze_ask("embed", "the king", "--url", server.url).stdout.splitlines()[1]
    assert table.split()[1:] == [*(f"{number:.4f}" for number in row["vector"][:6]), "..."]


def test_ask_answers_without_a_server(tiny_store: Path) -> None:
    """The test's environment has no server at the default address."""
    done = cloze_ask("nsp", "the king", "he was old", CLOZE_MODEL_STORE=str(tiny_store))
    if "no answer from" not in done.stderr:
        pytest.skip("something listens at http://localhost:8000")
    assert done.stdout.split()[:3] == ["label", "score", "IsNext"]
    assert "answering in this process" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nsp", "a"), 2, "nsp takes TEXT NEXT; there is 1 argument\n"),
        (("classify", "a", "b", "c", "--pair"), 2, "classify --pair takes TEXT OTHER; there are 3"),
        (("embed", "a", "--top-k", "3"), 2, "embed has no option --top-k"),
        (("embed", "a", "--url", "127.0.0.1:9"), 1, "no answer from http://127.0.0.1:9"),
        (("embed", "a", "--url", "ftp://x"), 2, "'ftp://x' is no address of a server"),
    ],
)
def test_ask_tells_what_is_wrong(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = cloze_ask(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"cloze: {message}")
    assert done.stderr.count("\n") == 1


def test_ask_classifies_each_text_or_one_pair() -> None:
    """A model is not needed to see what is sent."""
    sent: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            inputs = json.loads(self.rfile.read(int(self.headers["content-length"])))["inputs"]
            sent.append(inputs)
            label = [{"label": "good", "score": 1.0}]
            body = json.dumps([label if text != "none" else [] for text in inputs]).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever).start()
        try:
            url = f"127.0.0.1:{listening.server_port}"
            assert cloze_ask("classify", "none", CLOZE_URL=url).stdout == "nothing found\n"
            for arguments in (["a", "b", "c"], ["--pair", "a", "b"]):
                done = cloze_ask("classify", *arguments, "--json", CLOZE_URL=url)
                assert done.returncode == 0, done.stderr
                assert len(done.stdout.splitlines()) == len(sent[-1])
        finally:
            listening.shutdown()
    assert sent == [["none"], ["a", "b", "c"], [{"text": "a", "text_pair": "b"}]]


def test_ask_follows_the_variables_of_the_server(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    for environment in ({"CLOZE_PORT": port}, {"CLOZE_URL": server.url, "CLOZE_PORT": "9"}):
        done = cloze_ask("similarity", "the king", "the king", "--json", **environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["cosine"] == pytest.approx(1, abs=1e-5)
    refused = cloze_ask("embed", "a", CLOZE_PORT="tcp://10.0.0.1:8000")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "CLOZE_PORT is 'tcp://10.0.0.1:8000', which is no port" in refused.stderr
