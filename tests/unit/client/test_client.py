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

import cloze.client
from cloze.client import AsyncClient, Client, calls, clients, vector_calls
from cloze.client.errors import (
    ClientError,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerUnreachable,
)
from cloze.client.results import (
    Answer,
    Entity,
    Filling,
    Label,
    Prediction,
    Rank,
    Score,
    ScoredToken,
    Word,
    WordPrediction,
)

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


def echo_rows(request: httpx.Request) -> httpx.Response:
    """Answer with one vector per input: the length of the text."""
    rows = [len(text) for text in json.loads(request.content)["inputs"]]
    headers = {"x-shape": f"{len(rows)},1", "x-dtype": "float32"}
    return httpx.Response(200, content=np.array(rows, "<f4").tobytes(), headers=headers)


WORD = {"score": 0.5, "token": 7, "token_str": "red", "sequence": "red door"}


def test_predictions_of_one_and_of_several_masks() -> None:
    recorded = answering([[WORD], [[WORD], [WORD, WORD]]])
    result = recorded.client.fill_mask(
        ["a", "b"], top_k=2, targets=("x",), long_text="window", model="m"
    )
    one = Prediction(0.5, 7, "red", "red door")
    assert result == [[[one]], [[one], [one, one]]]
    assert recorded.bodies == [
        {
            "inputs": ["a", "b"],
            "parameters": {"top_k": 2, "targets": ["x"], "long_text": "window"},
            "model": "m",
        }
    ]
    assert recorded.requests[0].url == "http://cloze/fill-mask"
    assert recorded.requests[0].method == "POST"
    assert recorded.requests[0].headers["accept"] == "application/json"


def test_what_is_not_given_is_not_sent() -> None:
    recorded = answering([[]])
    assert recorded.client.fill_mask("a") == [[[]]]
    assert recorded.bodies == [{"inputs": ["a"]}]


def test_words_and_fillings() -> None:
    word = {"score": 0.5, "tokens": [7, 8], "token_str": "reds", "sequence": "s", "later": 1}
    recorded = answering([[word]])
    assert recorded.client.fill_mask_words("a", ["reds"], top_k=1) == [
        [[WordPrediction(0.5, [7, 8], "reds", "s")]]
    ]
    assert recorded.bodies[0]["parameters"] == {
        "top_k": 1, "targets": ["reds"], "targets_as": "words",
    }  # fmt: skip
    filling = {"score": 0.5, "tokens": [7], "token_strs": ["red"], "sequence": "s"}
    recorded = answering([[filling]])
    assert recorded.client.fill_mask_jointly("a") == [[Filling(0.5, [7], ["red"], "s")]]
    assert recorded.bodies[0]["parameters"] == {"decode": "beam"}


def test_scores() -> None:
    token = {"token": "a", "start": 0, "end": 1, "log_probability": -2.0}
    recorded = answering([{"score": -2.0, "tokens": [token]}])
    assert recorded.client.score("a", long_text="window") == [
        Score(-2.0, [ScoredToken("a", 0, 1, -2.0)])
    ]
    assert recorded.requests[0].url.path == "/score"
    assert recorded.bodies == [{"inputs": ["a"], "parameters": {"long_text": "window"}}]


def test_next_sentences_are_the_scores_of_the_first_label() -> None:
    labels = [{"label": "IsNext", "score": 0.75}, {"label": "NotNext", "score": 0.25}]
    recorded = answering([labels, labels])
    result = recorded.client.nsp([("a", "b"), ("c", "d")])
    assert (result.tolist(), result.dtype) == ([0.75, 0.75], np.float32)
    assert recorded.bodies[0]["inputs"] == [{"text": "a", "next": "b"}, {"text": "c", "next": "d"}]
    recorded = answering([labels])
    assert recorded.client.nsp(("a", "b")).tolist() == [0.75]
    assert recorded.bodies[0]["inputs"] == [{"text": "a", "next": "b"}]
    assert recorded.requests[0].url.path == "/nsp"


def test_answers_of_one_and_of_several() -> None:
    answer = {"answer": "red", "score": 0.5, "start": 0, "end": 3}
    recorded = answering([answer, [answer, answer]])
    result = recorded.client.qa(
        [("q", "c"), ("r", "d")],
        top_k=2,
        doc_stride=3,
        max_answer_len=4,
        handle_impossible_answer=True,
    )
    one = Answer("red", 0.5, 0, 3)
    assert result == [[one], [one, one]]
    assert recorded.bodies[0] == {
        "inputs": [{"question": "q", "context": "c"}, {"question": "r", "context": "d"}],
        "parameters": {"top_k": 2, "doc_stride": 3, "max_answer_len": 4, "handle_impossible_answer": True},
    }  # fmt: skip
    assert recorded.requests[0].url.path == "/qa"


def test_labels_of_texts_and_pairs() -> None:
    recorded = answering([[{"label": "x", "score": 0.5}]] * 2)
    assert (
        recorded.client.classify(["a", ("b", "c")], label_set="s", function_to_apply="none")
        == [[Label("x", 0.5)]] * 2
    )
    assert recorded.bodies[0]["inputs"] == ["a", {"text": "b", "text_pair": "c"}]
    assert recorded.bodies[0]["parameters"] == {"label_set": "s", "function_to_apply": "none"}
    recorded = answering([[]])
    recorded.client.classify(("b", "c"))
    assert recorded.bodies[0]["inputs"] == [{"text": "b", "text_pair": "c"}]
    assert recorded.requests[0].url.path == "/classify"


def test_entities_of_groups_and_of_tokens() -> None:
    place = {"score": 0.5, "word": "w", "start": 1, "end": 2}
    recorded = answering(
        [[place | {"entity_group": "PER"}, place | {"entity": "B-PER", "index": 1}]]
    )
    result = recorded.client.token_classification("a", label_set="s", stride=2)
    assert result == [[Entity("PER", 0.5, "w", 1, 2), Entity("B-PER", 0.5, "w", 1, 2)]]
    assert recorded.bodies[0]["parameters"] == {"label_set": "s", "stride": 2}
    assert recorded.requests[0].url.path == "/token-classification"


def test_ranks_are_joined_by_their_scores() -> None:
    recorded = answering(
        [{"index": 1, "score": 0.9}, {"index": 0, "score": 0.1}],
        [{"index": 0, "score": 0.5}],
        batch_size=2,
    )
    result = recorded.client.rerank("q", ["a", "b", "c"], raw_scores=True, model="m")
    assert result == [Rank(1, 0.9), Rank(2, 0.5), Rank(0, 0.1)]
    assert recorded.bodies[1] == {"query": "q", "texts": ["c"], "raw_scores": True, "model": "m"}
    assert recorded.requests[0].url.path == "/rerank"


def test_vectors_are_bytes() -> None:
    recorded = Recorded(echo_rows, batch_size=2)
    result = recorded.client.embed(
        ["a", "bb", "ccc"], normalize=False, prompt_name="p", layers="first"
    )
    assert (result.tolist(), result.dtype) == ([[1], [2], [3]], np.float32)
    assert [body["inputs"] for body in recorded.bodies] == [["a", "bb"], ["ccc"]]
    assert recorded.bodies[1] == {
        "inputs": ["ccc"], "normalize": False, "prompt_name": "p", "layers": "first",
    }  # fmt: skip
    assert recorded.requests[0].headers["accept"] == "application/octet-stream; dtype=float32"


@pytest.mark.parametrize(
    ("dtype", "stored", "headers", "expected"),
    [
        ("float16", np.array([[0.5, 2]], "<f2"), {}, np.array([[0.5, 2]], np.float32)),
        ("int8", np.array([[-2, 4]], "i1"), {"x-scale": "0.25"}, np.array([[-0.5, 1]], np.float32)),
        ("ubinary", np.array([[129, 3]], "u1"), {}, np.array([[129, 3]], np.uint8)),
    ],
)
def test_numbers_of_other_types(dtype: Any, stored: Any, headers: dict, expected: Any) -> None:
    shape = {"x-shape": "1,2", "x-dtype": dtype}
    recorded = Recorded(
        lambda _: httpx.Response(200, content=stored.tobytes(), headers=shape | headers)
    )
    result = recorded.client.embed("a", dtype=dtype)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == expected.dtype
    assert recorded.requests[0].headers["accept"].endswith(f"dtype={dtype}")


def test_vectors_of_tokens_are_split_by_their_lengths() -> None:
    headers = {"x-shape": "5,1", "x-dtype": "float32", "x-lengths": "2,3"}
    content = np.arange(5, dtype="<f4").tobytes()
    recorded = Recorded(lambda _: httpx.Response(200, content=content, headers=headers))
    first, second = recorded.client.embed_all(["a", "b"], truncate=False)
    assert (first.tolist(), second.tolist()) == ([[0], [1]], [[2], [3], [4]])
    assert first.base.shape == first.shape, "it keeps no more than its own rows"
    assert recorded.bodies == [{"inputs": ["a", "b"], "truncate": False}]
    assert recorded.requests[0].url.path == "/embed_all"


def test_sparse_words_and_similarities() -> None:
    recorded = answering([[{"index": 3, "value": 0.5, "token": "red"}]])
    assert recorded.client.embed_sparse("a", top_k=1) == [[Word(3, 0.5, "red")]]
    assert recorded.bodies == [{"inputs": ["a"], "top_k": 1, "return_tokens": True}]
    recorded = answering([0.5], [0.25], batch_size=1)
    assert recorded.client.similarity("s", ["a", "b"], model="m").tolist() == [0.5, 0.25]
    assert recorded.bodies[1] == {
        "inputs": {"source_sentence": "s", "sentences": ["b"]}, "model": "m",
    }  # fmt: skip
    assert recorded.requests[0].url.path == "/similarity"


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
    """Except the type of the numbers, which is a header."""
    method = getattr(Client, name)
    parameters = inspect.signature(method).parameters.values()
    options = {p.name: valid(p) for p in parameters if p.kind is p.KEYWORD_ONLY}
    for header in ("dtype", "expect_embedding_space"):
        options.pop(header, None)
    recorded = Recorded(lambda _: httpx.Response(400, json={"error": "no"}))
    first = {"nsp": [("a", "b")], "qa": [("a", "b")], "rerank": "q", "similarity": "q"}
    positional = [first.get(name, "a")]
    if name in ("rerank", "similarity", "fill_mask_words", "zero_shot_classification"):
        positional.append(["a", "b"])
    with pytest.raises(RequestRefused):
        getattr(recorded.client, name)(*positional, **options)
    [body] = recorded.bodies
    sent = body | body.get("parameters", {})
    for option, value in options.items():
        expected = list(value) if option == "targets" else value
        assert sent["decode" if option == "method" else option] == expected, option


# ---- batches, errors, retries ------------------------------------------------------------------


def test_no_input_is_one_request() -> None:
    recorded = answering([])
    assert recorded.client.fill_mask([]) == []
    assert len(recorded.requests) == 1


def test_a_full_batch_is_one_request() -> None:
    recorded = Recorded(echo_rows, batch_size=2)
    recorded.client.embed(["a", "b"])
    assert len(recorded.requests) == 1


def test_options_out_of_their_limits() -> None:
    for options in ({"batch_size": 0}, {"retries": -1}):
        with pytest.raises(ValueError, match="must be at least"):
            Client("http://cloze", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
        AsyncClient("http://cloze", concurrency=0)
    Client("http://cloze", batch_size=1, retries=0).close()


def test_defaults() -> None:
    client = Client()
    assert (client._options.batch_size, client._options.retries) == (256, 3)
    assert client._options.progress is False
    assert client._http.timeout.read == 60
    assert str(client._http.base_url) == "http://localhost:8000"
    client.close()
    assert client._http.is_closed


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
def test_a_busy_server_is_asked_again(status: int, waits: list[float]) -> None:
    recorded, info = failing(status, 3)
    assert info() == {"models": []}
    assert len(recorded.requests) == 4
    assert waits == pytest.approx([0.375, 0.75, 1.5])
    assert recorded.requests[0].method == "GET"
    assert recorded.requests[0].url == "http://cloze/info"


def test_retries_end(waits: list[float]) -> None:
    recorded, info = failing(
        429, 4, json={"error": "full"}, headers={"x-request-id": "r1", "x-error-code": "overloaded"}
    )
    with pytest.raises(ServerBusy, match="429: full") as caught:
        info()
    assert len(recorded.requests) == 4
    assert (caught.value.status, caught.value.request_id) == (429, "r1")
    assert caught.value.code == "overloaded"
    assert caught.value.retry_after_s is None


def test_waits_grow_to_half_a_minute() -> None:
    longest = list(clients._Options(batch_size=1, retries=9, progress=False).waits_s())
    assert len(longest) == 9
    for retry, wait in enumerate(longest):
        assert 0.5 * min(30, 0.5 * 2**retry) <= wait <= min(30, 0.5 * 2**retry)


def test_the_server_s_time_is_waited_for(waits: list[float]) -> None:
    _, info = failing(429, 2, headers={"retry-after": "7"})
    info()
    assert waits == [7, 7]


def test_a_time_of_half_a_minute_is_the_longest(waits: list[float]) -> None:
    _, info = failing(503, 1, headers={"retry-after": "30"})
    info()
    assert waits == [30]
    recorded, info = failing(503, 1, headers={"retry-after": "31"})
    with pytest.raises(ServerBusy) as caught:
        info()
    assert len(recorded.requests) == 1
    assert caught.value.retry_after_s == 31


@pytest.mark.parametrize("header", ["-3", "0"])
def test_a_time_in_the_past_is_now(header: str, waits: list[float]) -> None:
    _, info = failing(429, 1, headers={"retry-after": header})
    info()
    assert waits == [0]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestRefused),
        (404, RequestRefused),
        (422, RequestRefused),
        (500, ServerFailed),
        (504, ServerFailed),
    ],
)
def test_other_statuses_are_not_asked_again(
    status: int, kind: type[ClientError], waits: list[float]
) -> None:
    recorded, info = failing(status, 1, text="plain")
    with pytest.raises(ClientError, match=f"{status}: plain") as caught:
        info()
    assert type(caught.value) is kind
    assert len(recorded.requests) == 1
    assert waits == []


def test_a_message_without_content_is_the_reason() -> None:
    for content, message in (
        (b"", "404: Not Found"),
        (b"[]", r"404: \[\]"),
        (b"x" * 300, f"404: {'x' * 200}$"),
    ):
        _, info = failing(404, 1, content=content)
        with pytest.raises(RequestRefused, match=message):
            info()


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError,
        httpx.ReadError,
        httpx.RemoteProtocolError,
        httpx.ConnectTimeout,
        httpx.PoolTimeout,
    ],
)
def test_a_request_that_may_not_have_arrived_is_sent_again(
    error: type[httpx.TransportError], waits: list[float]
) -> None:
    errors = iter([error("no")])

    def handler(_: httpx.Request) -> httpx.Response:
        for one in errors:
            raise one
        return httpx.Response(200, json={})

    recorded = Recorded(handler)
    assert recorded.client.info() == {}
    assert len(recorded.requests) == 2
    assert waits == pytest.approx([0.375])


@pytest.mark.parametrize("error", [httpx.ReadTimeout, httpx.UnsupportedProtocol])
def test_a_request_that_has_had_its_time_is_not(
    error: type[httpx.TransportError], waits: list[float]
) -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise error("no")

    recorded = Recorded(handler)
    with pytest.raises(ServerUnreachable, match=r"http://cloze.*: no$"):
        recorded.client.info()
    assert len(recorded.requests) == 1


def test_headers_go_with_every_request() -> None:
    recorded = answering({}, headers={"authorization": "Bearer k"})
    with recorded.client as client:
        client.info()
    assert recorded.requests[0].headers["authorization"] == "Bearer k"
    assert recorded.client._http.is_closed


@pytest.mark.parametrize("name", ["embed", "embed_all", "embed_sparse"])
def test_vectors_of_two_spaces_are_not_joined(name: str) -> None:
    spaces = iter(["one", "two", "one", "one"])

    def reply(_: httpx.Request) -> httpx.Response:
        shape = {"x-shape": "1,1", "x-dtype": "float32", "x-lengths": "1"}
        content = b"[[]]" if name == "embed_sparse" else b"\0" * 4
        headers = shape | {"x-embedding-space": next(spaces)}
        return httpx.Response(200, content=content, headers=headers)

    call = getattr(Recorded(reply, batch_size=1).client, name)
    with pytest.raises(ServerFailed, match="one and two"):
        call(["a", "b"])
    assert len(call(["a", "b"])) == 2


@pytest.mark.parametrize("name", ["embed", "embed_all", "embed_sparse"])
def test_the_expected_space_goes_with_each_kind_of_vectors(name: str) -> None:
    recorded = Recorded(lambda _: httpx.Response(412, json={"error": "another space"}))
    with pytest.raises(RequestRefused, match="another space"):
        getattr(recorded.client, name)("a", expect_embedding_space="own")
    assert recorded.requests[0].headers["x-expect-embedding-space"] == "own"


def run_async(client: AsyncClient, call: Callable[[AsyncClient], Any]) -> Any:
    async def run() -> Any:
        async with client:
            return await call(client)

    result = asyncio.run(run())
    assert client._http.is_closed
    return result


def test_requests_of_coroutines_run_at_once_up_to_the_limit() -> None:
    running, most = 0, 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10):
            await asyncio.sleep(0)
        running -= 1
        return echo_rows(request)

    client = AsyncClient(
        "http://cloze", batch_size=1, concurrency=3, transport=httpx.MockTransport(handler)
    )
    texts = ["a" * n for n in range(1, 8)]
    result = run_async(client, lambda c: c.embed(texts))
    assert result.ravel().tolist() == list(range(1, 8))
    assert most == 3


def test_ranks_of_coroutines_have_the_places_of_the_whole_list() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        [text] = json.loads(request.content)["texts"]
        return httpx.Response(200, json=[{"index": 0, "score": float(text)}])

    client = AsyncClient("http://cloze", batch_size=1, transport=httpx.MockTransport(handler))
    result = run_async(client, lambda c: c.rerank("q", ["0.1", "0.9", "0.5"]))
    assert result == [Rank(1, 0.9), Rank(2, 0.5), Rank(0, 0.1)]


def test_coroutines_try_again_and_raise_the_same_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_FIRST_WAIT_S", 0.0)
    statuses = iter([429, 503, 200, 400])

    async def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(next(statuses), json={"error": "no"})

    client = AsyncClient("http://cloze", transport=httpx.MockTransport(handler))

    async def both(c: AsyncClient) -> Any:
        first = await c.info()
        with pytest.raises(RequestRefused):
            await c.info()
        return first

    assert run_async(client, both) == {"error": "no"}


def test_both_clients_have_every_call() -> None:
    functions = {
        name
        for module in (calls, vector_calls)
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_") and value.__module__ == module.__name__
    }
    for kind in (Client, AsyncClient):
        assert all(callable(getattr(kind, name, None)) for name in functions)
        assert list(inspect.signature(kind.nsp).parameters) == [
            "self",
            "pairs",
            "long_text",
            "model",
        ]


def test_one_pair_is_a_tuple_of_two_texts() -> None:
    labels = [{"label": "IsNext", "score": 0.75}]
    recorded = answering([labels, labels])
    recorded.client.nsp((("a", "b"), ("c", "d")))
    assert len(recorded.bodies[0]["inputs"]) == 2


def test_both_clients_have_the_same_defaults() -> None:
    other = AsyncClient()
    assert (other._options.batch_size, other._options.retries, other._concurrency) == (256, 3, 4)
    assert other._options.progress is False
    assert other._http.timeout.read == 60
    asyncio.run(other.close())


def test_a_failed_request_ends_the_others_of_its_call() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["inputs"] == ["wrong"]:
            return httpx.Response(400, json={"error": "no"})
        return await asyncio.Future()

    async def run() -> int:
        client = AsyncClient("http://cloze", batch_size=1, transport=httpx.MockTransport(handler))
        async with client:
            with pytest.raises(RequestRefused):
                await client.embed(["wrong", "waits", "waits too"])
            return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_every_exported_name_exists() -> None:
    assert [name for name in cloze.client.__all__ if not hasattr(cloze.client, name)] == []


def test_a_bar_shows_the_requests_of_a_long_list(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Recorded(echo_rows, batch_size=1, progress=True)
    recorded.client.embed(["a"])
    assert capsys.readouterr().err == ""
    recorded.client.embed(["a", "b"])
    assert "2/2" in capsys.readouterr().err
