"""The Python client: results of every task, batches, retries and errors; and ``cloze ask``."""

import asyncio
import inspect
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

from cloze.ask import _ASKING, _print_table
from cloze.client import (
    AsyncClient,
    Client,
    ClientError,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerUnreachable,
    calls,
    vector_calls,
)
from cloze.service.tasks import TASKS
from tests.support.serving import Server, running_server

TEXTS = ["the king", "a moon over the sea", "the old house", "red", "walk", "who was he?", "time"]


@pytest.fixture(scope="module")
def server(tiny_store: Path) -> Iterator[Server]:
    with running_server(tiny_store) as server:
        yield server


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
    assert [[len(predictions) for predictions in masks] for masks in found] == [
        [2],
        [2, 2],
        [2],
        [2],
    ]
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


def test_similarity_and_ranks(client: Client) -> None:
    cosines = client.similarity("the king", TEXTS)
    assert cosines[0] == pytest.approx(1, abs=1e-5)
    ranks = client.rerank("the king", TEXTS)
    assert [rank.index for rank in ranks] == np.argsort(-cosines, kind="stable").tolist()
    assert [rank.score for rank in ranks] == pytest.approx(sorted(cosines, reverse=True))


def test_the_asynchronous_client_gives_the_same(server: Server, client: Client) -> None:
    async def ask() -> None:
        async with AsyncClient(server.url, batch_size=2, progress=True) as other:
            np.testing.assert_array_equal(await other.embed(TEXTS), client.embed(TEXTS))
            ranks = await other.rerank("the king", TEXTS)
            assert [r.index for r in ranks] == [r.index for r in client.rerank("the king", TEXTS)]
            assert (await other.info())["defaults"] == client.info()["defaults"]
            with pytest.raises(RequestRefused, match=r"^400: inputs\[1\] is empty"):
                await other.embed(["a", "b", "c", "", "e", "f"])

    asyncio.run(ask())


def test_progress_is_shown_for_several_requests(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    with Client(server.url, batch_size=2, progress=True) as client:
        client.embed(TEXTS[:2])
        assert capfd.readouterr().err == ""
        client.embed(TEXTS)
    assert "4/4" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.embed([]), "400: inputs is an empty list"),
        (lambda c: c.embed("a", model="nobody"), "404: no model 'nobody' is served"),
        (lambda c: c.fill_mask("no mask"), "422: inputs.* holds no mask token"),
        (lambda c: c.classify("a"), "424: no served model can do text-classification"),
        (lambda c: c.token_classification("a"), "424: no served model can do token-class"),
    ],
)
def test_refusals_are_told(client: Client, call: Callable[[Client], object], message: str) -> None:
    with pytest.raises(RequestRefused, match=f"^{message}") as caught:
        call(client)
    assert caught.value.status == int(message[:3])
    assert caught.value.request_id


def scripted(*replies: int | Exception, **headers: str) -> tuple[httpx.MockTransport, list[str]]:
    """Return a transport that gives these statuses, or raises, and the paths that were asked."""
    asked: list[str] = []
    rest = iter(replies)

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        status = next(rest)
        if isinstance(status, Exception):
            raise status
        body = {"error": "full"} if status != 200 else [0.5]
        return httpx.Response(status, json=body, headers=headers)

    return httpx.MockTransport(reply), asked


def ask_both(transport: httpx.MockTransport, **options: Any) -> list[Callable[[], object]]:
    async def ask() -> object:
        async with AsyncClient(transport=transport, **options) as client:
            return await client.similarity("a", "b")

    return [
        lambda: Client(transport=transport, **options).similarity("a", "b"),
        lambda: asyncio.run(ask()),
    ]


@pytest.mark.parametrize("which", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("replies", "requests", "error"),
    [
        ((429, 503, 200), 3, None),
        ((429, 429, 429), 3, ServerBusy),
        ((503, 422), 2, RequestRefused),
        ((422,), 1, RequestRefused),
        ((500,), 1, ServerFailed),
        ((504,), 1, ServerFailed),
        ((httpx.ReadTimeout("too late"),), 1, ServerUnreachable),
        ((httpx.UnsupportedProtocol("no scheme"),), 1, ServerUnreachable),
    ],
)
def test_what_may_pass_is_sent_again(
    which: int,
    replies: tuple[int | Exception, ...],
    requests: int,
    error: type[ClientError] | None,
) -> None:
    transport, asked = scripted(*replies, **{"retry-after": "0"})
    ask = ask_both(transport, retries=2)[which]
    if error is None:
        ask()
    else:
        with pytest.raises(error):
            ask()
    assert len(asked) == requests


def test_the_servers_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    transport, _ = scripted(429, 429, 200, **{"retry-after": "7"})
    ask_both(transport)[0]()
    assert slept == [7.0, 7.0]
    transport, asked = scripted(429, **{"retry-after": "600"})
    with pytest.raises(ServerBusy) as caught:
        ask_both(transport)[0]()
    assert (caught.value.retry_after_s, len(asked)) == (600.0, 1)
    transport, _ = scripted(httpx.ConnectError("refused"), httpx.ConnectError("refused"), 200)
    slept.clear()
    ask_both(transport)[0]()
    assert 0.25 <= slept[0] <= 0.5 <= slept[1] <= 1.0


def test_no_server_is_one_clear_error() -> None:
    with pytest.raises(ServerUnreachable, match=r"no answer from http://127\.0\.0\.1:9: "):
        Client("http://127.0.0.1:9", retries=0).embed("a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"retries": -1}, "retries must be at least 0, got -1"),
        ({"url": "ftp://host"}, "'ftp://host' is no address of a server, such as http://"),
        ({"url": ""}, "'' is no address of a server"),
        ({"url": "localhost:port"}, "'localhost:port' is no address of a server: Invalid port"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=message):
            kind(**options)
    with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
        AsyncClient(concurrency=0)


def test_an_address_without_a_scheme_is_http(server: Server, client: Client) -> None:
    with Client(server.url.removeprefix("http://")) as other:
        assert other.info()["defaults"] == client.info()["defaults"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.qa("hi"), TypeError, r"qa takes a pair \(question, context\) or a list of"),
        (lambda c: c.qa(["hi", "ho"]), TypeError, "qa takes a pair .*, got one text at 0"),
        (lambda c: c.qa(("a", "b", "c")), TypeError, "qa takes a pair .*, got one text at 0"),
        (lambda c: c.nsp([("a",)]), TypeError, "nsp takes .*, got a tuple of 1 at 0"),
        (lambda c: c.nsp(None), TypeError, r"nsp takes a pair \(text, next\).*, got None"),
        (lambda c: c.classify(("a", "b", "c")), TypeError, "classify takes .*got a tuple of 3"),
        (lambda c: c.classify(["a", ["b"]]), TypeError, "classify takes .*got a list of 1 at 1"),
        (lambda c: c.classify({"text": "a"}), TypeError, "classify takes a text, a pair .*dict"),
        (lambda c: c.embed(3), TypeError, "embed takes a text or a list of texts, got .* int"),
        (lambda c: c.embed_all(b"a"), TypeError, "embed_all takes .*, got a value of type bytes"),
        (lambda c: c.embed_sparse(["a", None]), TypeError, "embed_sparse takes .*, got None at 1"),
        (lambda c: c.score(None), TypeError, "score takes .*, got None"),
        (lambda c: c.token_classification([("a", "b")]), TypeError, "token_class.*a tuple of 2"),
        (lambda c: c.fill_mask("a", targets="moon"), TypeError, "fill_mask takes targets as a li"),
        (lambda c: c.fill_mask_words("a", "moon"), TypeError, "fill_mask_words takes targets as"),
        (lambda c: c.fill_mask("a", top_k=True), TypeError, "fill_mask takes a whole number or N"),
        (
            lambda c: c.fill_mask_jointly("a", decode="best"),
            ValueError,
            "fill_mask_jointly takes one of",
        ),
        (lambda c: c.similarity(["a"], "b"), TypeError, "similarity takes one text as source"),
        (lambda c: c.rerank(None, ["b"]), TypeError, "rerank takes one text as query, got None"),
        (lambda c: c.embed("a", pooling="sum"), ValueError, "embed takes one of cls, mean, max as"),
        (lambda c: c.embed("a", dtype=4), TypeError, "embed takes one of float32, .*as dtype, got"),
        (lambda c: c.embed("a", model=4), TypeError, "embed takes a text or None as model, got a"),
        (lambda c: c.qa(("a", "b"), topk=2), TypeError, "qa.* unexpected keyword argument 'topk'"),
    ],
)
def test_every_method_says_what_it_takes(
    call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    transport, asked = scripted()

    async def ask() -> None:
        async with AsyncClient(transport=transport) as client:
            await call(client)

    for called in (lambda: call(Client(transport=transport)), lambda: asyncio.run(ask())):
        with pytest.raises(error, match=f"^{message}"):
            called()
    assert asked == []


@pytest.mark.parametrize(
    ("texts", "sent"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), [{"text": "a", "text_pair": "b"}]),
        (["a", ("b", "c")], ["a", {"text": "b", "text_pair": "c"}]),
        ((("a", "b"), ["c", "d"]), [{"text": t, "text_pair": p} for t, p in ("ab", "cd")]),
        (np.array(["a", "b"]), ["a", "b"]),
        (iter(["a", "b"]), ["a", "b"]),
    ],
)
def test_only_a_tuple_is_a_pair(texts: Any, sent: list[Any]) -> None:
    assert calls.classify(texts).inputs == sent


def test_both_clients_have_a_method_per_task_with_its_parameters() -> None:
    functions = {
        name: function
        for module in (calls, vector_calls)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert len(functions) == 15
    called = {name.replace("_", "-") for name in functions} | {"text-classification"}
    assert set(TASKS) <= called, "classify does text-classification"
    assert set(TASKS) <= _ASKING.keys() | {"text-classification"}
    for kind in (Client, AsyncClient):
        for name, function in functions.items():
            method = inspect.signature(getattr(kind, name))
            assert ["self", *inspect.signature(function).parameters] == list(method.parameters)


def test_the_client_needs_neither_the_runtime_nor_the_server() -> None:
    program = "import sys, cloze.client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "httpx" in loaded
    assert not loaded & {"onnxruntime", "torch", "fastapi", "pydantic", "tokenizers", "tqdm"}


# ---- cloze ask -----------------------------------------------------------------------------------


def cloze_ask(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cloze", "ask", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **environment},
        timeout=60,
    )


def test_ask_prints_a_table(server: Server) -> None:
    done = cloze_ask("fill-mask", "the [MASK] was red", "--top-k", "2", "--url", server.url)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["score", "token", "sequence"]
    assert [len(lines), done.stderr] == [3, ""]
    many = cloze_ask("fill-mask", "the [MASK]", "a [MASK] [MASK]", "--url", server.url)
    assert many.stdout.split()[:5] == ["text", "mask", "score", "token", "sequence"]


def test_ask_says_so_if_there_are_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """For example a text without entities."""
    _print_table([])
    assert capsys.readouterr().out == "nothing found\n"


@pytest.mark.parametrize(
    ("arguments", "columns"),
    [
        (("score", "the king"), {"log_probability", "start", "token"}),
        (("embed", "the king"), {"dimensions", "vector"}),
        (("embed-all", "the king"), {"token", "dimensions", "vector"}),
        (("similarity", "the king", "a moon"), {"cosine", "text"}),
        (("nsp", "the king", "a moon"), {"label", "score"}),
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
    rows = cloze_ask(*arguments, "--url", server.url, "--json").stdout.splitlines()
    assert columns <= json.loads(rows[0]).keys()


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
        (("classify", "a", "--pair"), 2, "classify --pair takes TEXT OTHER; there is 1 argument"),
        (("classify", "a", "b", "c", "--pair"), 2, "classify --pair takes TEXT OTHER; there are 3"),
        (("embed", "a", "--pair"), 2, "embed has no option --pair"),
        (("qa", "a", "b", "c"), 2, "qa takes QUESTION CONTEXT; there are 3 arguments"),
        (("embed", "a", "--top-k", "3"), 2, "embed has no option --top-k"),
        (("embed", "a", "--url", "http://127.0.0.1:9"), 1, "no answer from http://127.0.0.1:9"),
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
    label = [{"label": "good", "score": 1.0}]
    sent: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            inputs = json.loads(self.rfile.read(int(self.headers["content-length"])))["inputs"]
            sent.append(inputs)
            body = json.dumps([label for _ in inputs]).encode()
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
            for arguments in (["a"], ["a", "b"], ["a", "b", "c"], ["--pair", "a", "b"]):
                done = cloze_ask("classify", *arguments, "--json", CLOZE_URL=url)
                assert done.returncode == 0, done.stderr
                assert len(done.stdout.splitlines()) == len(sent[-1])
        finally:
            listening.shutdown()
    pair = {"text": "a", "text_pair": "b"}
    assert sent == [["a"], ["a", "b"], ["a", "b", "c"], [pair]]


def test_ask_prints_all_numbers_of_a_vector_as_json(server: Server, client: Client) -> None:
    row = json.loads(cloze_ask("embed", "the king", "--json", "--url", server.url).stdout)
    assert row["vector"] == pytest.approx(client.embed("the king")[0].tolist())
    table = cloze_ask("embed", "the king", "--url", server.url).stdout.splitlines()[1]
    assert table.split()[1:] == [*(f"{number:.4f}" for number in row["vector"][:6]), "..."]


def test_ask_follows_the_variables_of_the_server(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    for environment in ({"CLOZE_PORT": port}, {"CLOZE_URL": server.url, "CLOZE_PORT": "9"}):
        done = cloze_ask("similarity", "the king", "the king", "--json", **environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["cosine"] == pytest.approx(1, abs=1e-5)
    refused = cloze_ask("embed", "a", CLOZE_PORT="tcp://10.0.0.1:8000")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "CLOZE_PORT is 'tcp://10.0.0.1:8000', which is no port" in refused.stderr


def test_ask_shows_the_servers_error(server: Server) -> None:
    done = cloze_ask("fill-mask", "no mask here", "--url", server.url)
    assert done.returncode == 1
    assert done.stderr.startswith("cloze: 422: inputs[0] holds no mask token")
