"""The client against a transport that records requests and returns prepared responses."""

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable
from typing import Any, get_args

import httpx
import numpy as np
import pytest

from cloze.client import AsyncClient, Client, calls, clients, errors, vector_calls
from cloze.client import results as r
from cloze.service.tasks import TASKS

pytestmark = pytest.mark.anyio

Handler = Callable[[httpx.Request], httpx.Response]


class Recorded:
    """A client whose requests a handler answers."""

    def __init__(self, handler: Handler, **options: Any) -> None:
        self.requests: list[httpx.Request] = []

        def record(request: httpx.Request) -> httpx.Response:
            self.requests.append(request)
            return handler(request)

        self.client = Client("http://cloze", transport=httpx.MockTransport(record), **options)

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.requests]


def answering(*values: Any, **options: Any) -> Recorded:
    """Return a client whose requests get these JSON values, one after another."""
    rest = iter(values)
    return Recorded(lambda _: httpx.Response(200, json=next(rest)), **options)


def vectors_of(rows: Any, dtype: str = "float32", **headers: str) -> httpx.Response:
    """Return an answer of the bytes of an array; ``_`` in a header's name stands for a hyphen."""
    shape = {"x-shape": ",".join(map(str, rows.shape)), "x-dtype": dtype}
    shape |= {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(200, content=rows.tobytes(), headers=shape)


def echo_rows(request: httpx.Request) -> httpx.Response:
    """Answer with one vector per input: the length of the text."""
    rows = [[len(text)] for text in json.loads(request.content)["inputs"]]
    return vectors_of(np.array(rows, "<f4"))


WORD = {"score": 0.5, "token": 7, "token_str": "red", "sequence": "red door"}
ONE = r.Prediction(0.5, 7, "red", "red door")
WORDS_OF_MASK = {"score": 0.5, "tokens": [7, 8], "token_str": "reds", "sequence": "s", "later": 1}
FILLING = {"score": 0.5, "tokens": [7], "token_strs": ["red"], "sequence": "s"}
TOKEN = {"token": "a", "start": 0, "end": 1, "log_probability": -2.0}
PLACE = {"score": 0.5, "word": "w", "start": 1, "end": 2}
ANSWER = {"answer": "red", "score": 0.5, "start": 0, "end": 3}
RED = r.Answer("red", 0.5, 0, 3)


@pytest.mark.parametrize(
    ("call", "reply", "result", "path", "sent"),
    [
        (
            lambda c: c.fill_mask(["a", "b"], top_k=2, targets=("x",), long_text="window", model="m"),
            [[WORD], [[WORD], [WORD, WORD]]], [[[ONE]], [[ONE], [ONE, ONE]]], "fill-mask",
            {"inputs": ["a", "b"], "model": "m",
             "parameters": {"top_k": 2, "targets": ["x"], "long_text": "window"}},
        ),
        # What is not given is not sent.
        (lambda c: c.fill_mask("a"), [[]], [[[]]], "fill-mask", {"inputs": ["a"]}),
        (
            lambda c: c.fill_mask_words("a", ["reds"], top_k=1),
            [[WORDS_OF_MASK]], [[[r.WordPrediction(0.5, [7, 8], "reds", "s")]]], "fill-mask",
            {"inputs": ["a"], "parameters": {"top_k": 1, "targets": ["reds"], "targets_as": "words"}},
        ),
        (
            lambda c: c.fill_mask_jointly("a"),
            [[FILLING]], [[r.Filling(0.5, [7], ["red"], "s")]], "fill-mask",
            {"inputs": ["a"], "parameters": {"decode": "beam"}},
        ),
        (
            lambda c: c.score("a"), [{"score": -2.0, "tokens": [TOKEN]}],
            [r.Score(-2.0, [r.ScoredToken("a", 0, 1, -2.0)])], "score", {"inputs": ["a"]},
        ),
        (
            lambda c: c.token_classification("a"),
            [[PLACE | {"entity_group": "PER"}, PLACE | {"entity": "B-PER", "index": 1}]],
            [[r.Entity("PER", 0.5, "w", 1, 2), r.Entity("B-PER", 0.5, "w", 1, 2)]],
            "token-classification", {"inputs": ["a"]},
        ),
        (
            lambda c: c.qa([("q", "c"), ("r", "d")], top_k=2),
            [ANSWER, [ANSWER, ANSWER]], [[RED], [RED, RED]], "qa",
            {"inputs": [{"question": "q", "context": "c"}, {"question": "r", "context": "d"}],
             "parameters": {"top_k": 2}},
        ),
        (
            lambda c: c.embed_sparse("a", top_k=1), [[{"index": 3, "value": 0.5, "token": "red"}]],
            [[r.Word(3, 0.5, "red")]], "embed_sparse",
            {"inputs": ["a"], "top_k": 1, "return_tokens": True},
        ),
    ],
)  # fmt: skip
def test_a_method_sends_its_request_and_reads_its_answer(
    call: Callable[[Any], Any], reply: Any, result: Any, path: str, sent: Any
) -> None:
    recorded = answering(reply)
    assert call(recorded.client) == result
    [request] = recorded.requests
    assert (request.method, request.url) == ("POST", f"http://cloze/{path}")
    assert request.headers["accept"] == "application/json"
    assert recorded.bodies == [sent]


def test_next_sentences_are_the_scores_of_the_first_label() -> None:
    labels = [{"label": "IsNext", "score": 0.75}, {"label": "NotNext", "score": 0.25}]
    recorded = answering([labels, labels], [labels, labels], [labels])
    two = [{"text": "a", "next": "b"}, {"text": "c", "next": "d"}]
    for pairs in ([("a", "b"), ("c", "d")], (("a", "b"), ("c", "d"))):
        result = recorded.client.nsp(pairs)
        assert (result.tolist(), result.dtype) == ([0.75, 0.75], np.float32)
    assert recorded.client.nsp(("a", "b")).tolist() == [0.75]
    assert [body["inputs"] for body in recorded.bodies] == [two, two, two[:1]]
    assert recorded.requests[0].url.path == "/nsp"


@pytest.mark.parametrize(
    ("texts", "sent"),
    [
        ("a", ["a"]),
        (("a", "b"), [{"text": "a", "text_pair": "b"}]),
        (["a", ("b", "c")], ["a", {"text": "b", "text_pair": "c"}]),
        ((("a", "b"), ["c", "d"]), [{"text": t, "text_pair": p} for t, p in ("ab", "cd")]),
        (np.array(["a", "b"]), ["a", "b"]),
        (iter(["a", "b"]), ["a", "b"]),
    ],
)
def test_only_a_tuple_is_a_pair(texts: Any, sent: list[Any]) -> None:
    recorded = answering([[{"label": "x", "score": 0.5}]] * len(sent))
    assert recorded.client.classify(texts) == [[r.Label("x", 0.5)]] * len(sent)
    assert recorded.bodies == [{"inputs": sent}]
    assert recorded.requests[0].url.path == "/classify"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.qa("hi"), TypeError, "qa"),
        (lambda c: c.qa(("a", "b", "c")), TypeError, "qa .*, got one text at 0"),
        (lambda c: c.nsp([("a",)]), TypeError, "nsp .*, got a tuple of 1 at 0"),
        (lambda c: c.classify(["a", ["b"]]), TypeError, "classify .*got a list of 1 at 1"),
        (lambda c: c.token_classification([("a", "b")]), TypeError, "token_class.*a tuple of 2"),
        (lambda c: c.fill_mask("a", targets="moon"), TypeError, "fill_mask .*targets"),
        (lambda c: c.fill_mask("a", top_k=True), TypeError, "fill_mask .*whole number"),
        (lambda c: c.fill_mask_jointly("a", decode="best"), ValueError, "fill_mask_jointly"),
        (lambda c: c.similarity(["a"], "b"), TypeError, "similarity .*source"),
        (lambda c: c.embed("a", pooling="sum"), ValueError, "embed .*cls, mean, max"),
        (lambda c: c.qa(("a", "b"), topk=2), TypeError, "qa.* unexpected keyword argument 'topk'"),
    ],
)
async def test_every_method_says_what_it_takes(
    call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    recorded = answering()
    with pytest.raises(error, match=f"^{message}"):
        call(recorded.client)
    async with AsyncClient(transport=httpx.MockTransport(lambda _: None)) as client:
        with pytest.raises(error, match=f"^{message}"):
            await call(client)
    assert recorded.requests == []


def test_similarities_are_one_array_and_ranks_are_joined_by_their_scores() -> None:
    recorded = answering([0.5], [0.25], batch_size=1)
    assert recorded.client.similarity("s", ["a", "b"], model="m").tolist() == [0.5, 0.25]
    inputs = {"source_sentence": "s", "sentences": ["b"]}
    assert recorded.bodies[1] == {"inputs": inputs, "model": "m"}
    assert recorded.requests[0].url.path == "/similarity"
    recorded = answering(
        [{"index": 1, "score": 0.9}, {"index": 0, "score": 0.1}],
        [{"index": 0, "score": 0.5}],
        batch_size=2,
    )
    result = recorded.client.rerank("q", ["a", "b", "c"], raw_scores=True, model="m")
    assert result == [r.Rank(1, 0.9), r.Rank(2, 0.5), r.Rank(0, 0.1)]
    assert recorded.bodies[1] == {"query": "q", "texts": ["c"], "raw_scores": True, "model": "m"}
    assert recorded.requests[0].url.path == "/rerank"


def test_vectors_are_bytes() -> None:
    recorded = Recorded(echo_rows, batch_size=2)
    result = recorded.client.embed(["a", "bb", "ccc"], normalize=False, prompt_name="p")
    assert (result.tolist(), result.dtype) == ([[1], [2], [3]], np.float32)
    assert [body["inputs"] for body in recorded.bodies] == [["a", "bb"], ["ccc"]]
    assert recorded.bodies[1] == {"inputs": ["ccc"], "normalize": False, "prompt_name": "p"}
    assert recorded.requests[0].headers["accept"] == "application/octet-stream; dtype=float32"


@pytest.mark.parametrize(
    ("dtype", "stored", "headers", "expected"),
    [
        ("float16", np.array([[0.5, 2]], "<f2"), {}, np.array([[0.5, 2]], np.float32)),
        ("int8", np.array([[-2, 4]], "i1"), {"x_scale": "0.25"}, np.array([[-0.5, 1]], np.float32)),
        ("ubinary", np.array([[129, 3]], "u1"), {}, np.array([[129, 3]], np.uint8)),
    ],
)
def test_numbers_of_other_types(dtype: Any, stored: Any, headers: dict, expected: Any) -> None:
    recorded = Recorded(lambda _: vectors_of(stored, dtype, **headers))
    result = recorded.client.embed("a", dtype=dtype)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == expected.dtype
    assert recorded.requests[0].headers["accept"].endswith(f"dtype={dtype}")


def test_vectors_of_tokens_are_split_by_their_lengths() -> None:
    rows = np.arange(5, dtype="<f4")[:, None]
    recorded = Recorded(lambda _: vectors_of(rows, x_lengths="2,3"))
    first, second = recorded.client.embed_all(["a", "b"], truncate=False)
    assert (first.tolist(), second.tolist()) == ([[0], [1]], [[2], [3], [4]])
    assert first.base.shape == first.shape, "it keeps no more than its own rows"
    assert recorded.bodies == [{"inputs": ["a", "b"], "truncate": False}]
    assert recorded.requests[0].url.path == "/embed_all"


WORDS = ("targets", "labels", "patterns")
"""The options that are lists of words."""


def valid(parameter: inspect.Parameter) -> Any:
    """Return a value of a parameter's first type: a word, if it has words."""
    kind = (get_args(parameter.annotation) or (parameter.annotation,))[0]
    values: dict[Any, Any] = {str: f"a {parameter.name}", int: 7, bool: True, float: 0.5}
    words = get_args(kind) or (kind,)
    return ["a", "b"] if parameter.name in WORDS else values.get(kind, words[-1])


@pytest.mark.parametrize(
    "name", [n for n, v in vars(Client).items() if hasattr(v, "__signature__")]
)
def test_each_option_is_sent_under_its_name(name: str) -> None:
    method = getattr(Client, name)
    parameters = inspect.signature(method).parameters.values()
    options = {p.name: valid(p) for p in parameters if p.kind is p.KEYWORD_ONLY}
    for header in ("dtype", "expect_embedding_space"):  # these are headers
        options.pop(header, None)
    recorded = Recorded(lambda _: httpx.Response(400, json={"error": "no"}))
    first = {"nsp": [("a", "b")], "qa": [("a", "b")], "rerank": "q", "similarity": "q"}
    positional = [first.get(name, "a")]
    if name in ("rerank", "similarity", "fill_mask_words", "zero_shot_classification", "entities"):
        positional.append(["a", "b"])
    with pytest.raises(errors.RequestRefused):
        getattr(recorded.client, name)(*positional, **options)
    [body] = recorded.bodies
    sent = body | body.get("parameters", {})
    for option, value in options.items():
        expected = list(value) if option == "targets" else value
        assert sent["decode" if option == "method" else option] == expected, option


def test_options_out_of_their_limits() -> None:
    wrong = [{"url": url} for url in ("ftp://host", "", "localhost:port")]
    for kind in (Client, AsyncClient):
        for options in ({"batch_size": 0}, {"retries": -1}, *wrong):
            with pytest.raises(ValueError, match=r"must be at least|no address of a server"):
                kind(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
        AsyncClient("http://cloze", concurrency=0)
    Client("http://cloze", batch_size=1, retries=0).close()


@pytest.mark.parametrize(
    ("header", "expected"), [("7", [7]), ("30", [30]), ("0", [0]), ("-3", [0]), ("31", None)]
)
def test_the_server_s_time_is_waited_for_up_to_half_a_minute(
    header: str, expected: list[float] | None, waits: list[float]
) -> None:
    recorded, info = failing(503, 1, headers={"retry-after": header})
    if expected is None:
        with pytest.raises(errors.ServerBusy) as caught:
            info()
        assert (len(recorded.requests), caught.value.retry_after_s) == (1, float(header))
    else:
        info()
        assert waits == expected


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the waits before retries instead of waiting."""
    recorded: list[float] = []
    sleeping = threading.get_ident()

    def sleep(seconds: float) -> None:
        if threading.get_ident() == sleeping:
            recorded.append(seconds)
        else:  # a thread of another library; without a wait, it would spin
            really_sleep(seconds)

    really_sleep = time.sleep
    monkeypatch.setattr(clients.time, "sleep", sleep)
    monkeypatch.setattr(clients.random, "uniform", lambda low, high: (low + high) / 2)
    return recorded


def failing(status: int, times: int, **response: Any) -> tuple[Recorded, Callable[[], Any]]:
    """Return a client whose first requests get a status."""
    answers = iter([httpx.Response(status, **response) for _ in range(times)])
    recorded = Recorded(lambda _: next(answers, httpx.Response(200, json={"models": []})))
    return recorded, recorded.client.info


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_busy_server_is_asked_three_times_again(status: int, waits: list[float]) -> None:
    recorded, info = failing(status, 3)
    assert info() == {"models": []}
    assert len(recorded.requests) == 4
    assert waits == pytest.approx([0.375, 0.75, 1.5])
    assert recorded.requests[0].method == "GET"
    assert recorded.requests[0].url == "http://cloze/info"
    headers = {"x-request-id": "r1", "x-error-code": "overloaded"}
    recorded, info = failing(429, 4, json={"error": "full"}, headers=headers)
    with pytest.raises(errors.ServerBusy, match="429: full") as caught:
        info()
    assert len(recorded.requests) == 4
    error = caught.value
    assert (error.status, error.request_id, error.code) == (429, "r1", "overloaded")
    assert error.retry_after_s is None


@pytest.mark.parametrize("status", [400, 422, 500, 504])
def test_other_statuses_are_not_asked_again(status: int, waits: list[float]) -> None:
    recorded, info = failing(status, 1, text="plain")
    with pytest.raises(errors.ClientError, match=f"{status}: plain") as caught:
        info()
    assert type(caught.value) is (errors.RequestRefused if status < 500 else errors.ServerFailed)
    assert (len(recorded.requests), waits) == (1, [])


NEVER_ARRIVED = (
    "ConnectError",
    "ReadError",
    "RemoteProtocolError",
    "ConnectTimeout",
    "PoolTimeout",
)


@pytest.mark.parametrize("error", [*NEVER_ARRIVED, "ReadTimeout", "UnsupportedProtocol"])
def test_a_request_that_may_not_have_arrived_is_sent_again(error: str, waits: list[float]) -> None:
    raised = iter([getattr(httpx, error)("no")])

    def handler(_: httpx.Request) -> httpx.Response:
        for one in raised:
            raise one
        return httpx.Response(200, json={})

    recorded = Recorded(handler)
    if error in NEVER_ARRIVED:
        assert recorded.client.info() == {}
        assert waits == pytest.approx([0.375])
    else:
        with pytest.raises(errors.ServerUnreachable, match=r"http://cloze.*: no$"):
            recorded.client.info()
        assert waits == []


def test_headers_go_with_every_request() -> None:
    recorded = answering([], headers={"authorization": "Bearer k"})
    with recorded.client as client:
        assert client.fill_mask([]) == [], "no input is one request"
    [request] = recorded.requests
    assert request.headers["authorization"] == "Bearer k"
    assert recorded.client._http.is_closed


@pytest.mark.parametrize("name", ["embed", "embed_all", "embed_sparse"])
def test_vectors_of_two_spaces_are_not_joined(name: str) -> None:
    spaces = iter(["one", "two", "one", "one"])

    def reply(_: httpx.Request) -> httpx.Response:
        space = next(spaces)
        if name == "embed_sparse":
            return httpx.Response(200, json=[[]], headers={"x-embedding-space": space})
        return vectors_of(np.zeros((1, 1), "<f4"), x_lengths="1", x_embedding_space=space)

    recorded = Recorded(reply, batch_size=1)
    call = getattr(recorded.client, name)
    with pytest.raises(errors.ServerFailed, match="one and two"):
        call(["a", "b"])
    assert len(call(["a", "b"], expect_embedding_space="own")) == 2
    assert recorded.requests[-1].headers["x-expect-embedding-space"] == "own"


async def test_requests_of_coroutines_run_at_once_up_to_the_limit() -> None:
    running, most = list[int](), 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        for _ in range(10):
            await asyncio.sleep(0)
        running.pop()
        return echo_rows(request)

    transport = httpx.MockTransport(handler)
    async with AsyncClient(batch_size=1, concurrency=3, transport=transport) as client:
        result = await client.embed(["a" * n for n in range(1, 8)])
    assert result.ravel().tolist() == list(range(1, 8))
    assert most == 3


async def test_coroutines_try_again_and_raise_the_same_errors() -> None:
    statuses = iter([429, 503, 200, 400])

    def handler(_: httpx.Request) -> httpx.Response:
        headers = {"retry-after": "0"}
        return httpx.Response(next(statuses), json={"error": "no"}, headers=headers)

    async with AsyncClient(transport=httpx.MockTransport(handler)) as client:
        assert await client.info() == {"error": "no"}
        with pytest.raises(errors.RequestRefused):
            await client.info()


def test_both_clients_have_a_method_per_task_with_its_parameters() -> None:
    functions = {
        name: function
        for module in (calls, vector_calls)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    called = {name.replace("_", "-") for name in functions} | {"text-classification"}
    assert set(TASKS) <= called, "classify does text-classification"
    for kind in (Client, AsyncClient):
        for name, function in functions.items():
            method = inspect.signature(getattr(kind, name))
            assert ["self", *inspect.signature(function).parameters] == list(method.parameters)


async def test_a_failed_request_ends_the_others_of_its_call() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["inputs"] == ["wrong"]:
            return httpx.Response(400, json={"error": "no"})
        return await asyncio.Future()

    before = asyncio.all_tasks()
    async with AsyncClient(batch_size=1, transport=httpx.MockTransport(handler)) as client:
        with pytest.raises(errors.RequestRefused):
            await client.embed(["wrong", "waits", "waits too"])
        assert asyncio.all_tasks() == before


def test_a_bar_shows_the_requests_of_a_long_list(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Recorded(echo_rows, batch_size=1, progress=True)
    recorded.client.embed(["a"])
    assert capsys.readouterr().err == ""
    recorded.client.embed(["a", "b"])
    assert "2/2" in capsys.readouterr().err
