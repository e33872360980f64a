"""The Python client: results of every task, batches, retries and errors; and ``cloze ask``."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from cloze.client import AsyncClient, Client, RequestRefused
from tests.support.command import cloze, cloze_here
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
    done = cloze_here("ask", *arguments, "--url", server.url)
    assert done.exit_code == 0, done.stderr
    assert set(done.stdout.splitlines()[0].split()) == columns


def test_ask_prints_a_table_or_all_numbers_as_json(server: Server, client: Client) -> None:
    done = cloze_here("ask", "fill-mask", "the [MASK]", "a [MASK] [MASK]", "--url", server.url)
    assert done.stdout.split()[:5] == ["text", "mask", "score", "token", "sequence"]
    row = json.loads(cloze_here("ask", "embed", "the king", "--json", "--url", server.url).stdout)
    assert row["vector"] == pytest.approx(client.embed("the king")[0].tolist())
    table = cloze_here("ask", "embed", "the king", "--url", server.url).stdout.splitlines()[1]
    assert table.split()[1:] == [*(f"{number:.4f}" for number in row["vector"][:6]), "..."]


def test_ask_answers_without_a_server(tiny_store: Path) -> None:
    """The test's environment has no server at the default address."""
    done = cloze("ask", "nsp", "the king", "he was old", CLOZE_MODEL_STORE=str(tiny_store))
    if "no answer from" not in done.stderr:
        pytest.skip("something listens at http://localhost:8000")
    assert done.stdout.split()[:3] == ["label", "score", "IsNext"]
    assert "answering in this process" in done.stderr


def test_ask_classifies_each_text_or_one_pair(every_task: Server) -> None:
    for count, arguments in ((3, ("a", "b", "c")), (1, ("--pair", "a", "b"))):
        done = cloze_here("ask", "classify", *arguments, "--json", CLOZE_URL=every_task.url)
        assert done.exit_code == 0, done.stderr
        labels = [json.loads(line)["text"] for line in done.stdout.splitlines()]
        assert len(set(labels)) == count


def test_ask_follows_the_variables_of_the_server(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    for environment in ({"CLOZE_PORT": port}, {"CLOZE_URL": server.url, "CLOZE_PORT": "9"}):
        done = cloze_here("ask", "similarity", "the king", "the king", "--json", **environment)
        assert (done.exit_code, done.stderr) == (0, "")
        assert json.loads(done.stdout)["cosine"] == pytest.approx(1, abs=1e-5)
    refused = cloze_here("ask", "embed", "a", CLOZE_PORT="tcp://10.0.0.1:8000")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "CLOZE_PORT is 'tcp://10.0.0.1:8000', which is no port" in refused.stderr
