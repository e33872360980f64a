"""Requests of every protocol to a service in this process: what is read, run and answered."""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloze.service.core import ServedRequest
from cloze.service.errors import Rejection
from cloze.service.http.routes import RAW
from cloze.service.protocols import protocol
from tests.support.refusals import error_of
from tests.support.route_service import CLASSIFIER, EMBEDDER, Service
from tests.support.task_model import EMBEDDING
from tests.support.tensor_requests import binary, packed, sized, tensor

RANKER = CLASSIFIER | {
    "name": "ranker",
    "heads": {"sequence_classification": {"labels": ["score"], "problem_type": "regression"}},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A model of every task in two versions, and one that embeds."""
    folder = tmp_path_factory.mktemp("bundle")
    models = ({}, EMBEDDER, {"version": 2})
    with Service(folder, models) as made:
        yield made


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Service]:
    """A service whose state a test changes."""
    with Service(tmp_path) as made:
        yield made


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def test_headers_of_an_answer(service: Service) -> None:
    response = service.post("/embed", {"inputs": ["the", "a b c d e f g h i j"], "model": "small"})
    seen = service.seen
    assert (seen.model, seen.texts, seen.tokens, seen.truncated) == ("small@1", 2, 13, 1)
    total_ms = 1000 * (seen.tokenize_s + seen.queue_s + seen.inference_s)
    assert total_ms > 0
    for name, value in {
        "x-compute-tokens": 13,
        "x-truncated": 1,
        "x-compute-time": total_ms,
        "x-total-time": total_ms,
        "x-tokenization-time": 1000 * seen.tokenize_s,
        "x-queue-time": 1000 * seen.queue_s,
        "x-inference-time": 1000 * seen.inference_s,
    }.items():
        assert int(response.headers[name]) == round(value), name
    ok(service.post("/tokenize", {"inputs": "the"}))
    assert (service.seen.tokens, service.seen.truncated) == (0, 0)
    ollama, seen = ok(service.post("/api/embed", {"input": "the"})), service.seen
    total_s = seen.tokenize_s + seen.queue_s + seen.inference_s
    assert ollama["total_duration"] == int(1e9 * total_s)


def test_the_model_that_a_request_names(service: Service) -> None:
    for model, served in (
        (None, "tiny@3"),
        ("tiny", "tiny@3"),
        ("tiny@2", "tiny@2"),
        ("small", "small@1"),
    ):
        ok(service.post("/embed", {"inputs": "the", "model": model}))
        assert service.seen.model == served


def test_a_large_answer_is_held_until_it_is_read(service: Service) -> None:
    many = {"inputs": [[n % 9 + 109 for n in range(8)]] * 290, "normalize": False}
    response = service.post("/embed_all", many)
    assert len(ok(response)) == 290
    assert len(response.content) > 65_536
    hold = service.seen.answer
    assert hold.size == len(response.content)
    ok(service.post("/fill-mask", {"inputs": "the [MASK]"}))
    assert service.seen.answer is None


ASKED = {"question": "the", "context": "the the"}
LONG_TEXT = "\0" * 199 + "a"  # 1,200 bytes of JSON
COHERE_TEXT = {"model": "tiny", "input_type": "search_document"}


def test_a_large_answer_waits_for_its_turn(alone: Service) -> None:
    """A large answer is decoded and written on a thread, when it is its turn."""
    for client in ("x", "x", "y"):
        alone._runner.run(alone.limits.begin_answer(ServedRequest(client=client)))

    def ask(path: str, body: Any, ms: str = "20000") -> httpx.Response:
        return alone.post(path, body, x_request_timeout_ms=ms)

    late = ask("/embed_all", {"inputs": [[109] * 8] * 290}, "400")
    assert error_of(late) == (504, "timeout")
    assert alone.seen.rejection is Rejection.STATED_LIMIT
    ok(ask("/embed_all", {"inputs": "the"}))
    tops = {"parameters": {"top_k": 20}}
    for path, large, small in (
        # More than 64 rows of head results, in both rounds together or in one.
        ("/embed", {"inputs": ["the"] * 65}, {"inputs": ["the"] * 64}),
        ("/token-classification", {"inputs": ["the"] * 22}, {"inputs": ["the"] * 21}),
        ("/fill-mask", {"inputs": ["[MASK]"] * 4} | tops, {"inputs": ["[MASK]"] * 3} | tops),
        # More vectors, or more work, than the rows tell.
        ("/embed", {"inputs": "the", "spans": [[0, 3]] * 65}, {"inputs": "the"}),
        ("/tokenize", {"inputs": ["the"] * 22}, {"inputs": ["the"] * 21}),
        ("/qa", {"inputs": [ASKED] * 4} | tops, {"inputs": [ASKED] * 2} | tops),
        # Texts that the answer repeats.
        ("/nsp", *({"inputs": {"text": "a", "candidates": [LONG_TEXT] * n}} for n in (55, 54))),
        ("/v2/embed", *(COHERE_TEXT | {"texts": [LONG_TEXT] * n} for n in (55, 54))),
    ):
        assert ask(path, small).status_code == 200, path
        assert ask(path, large, "400").status_code == 504, path


def test_a_wrong_header_is_found_before_the_engine_runs(service: Service) -> None:
    before = service.engine.runs
    response = service.post("/embed", {"inputs": "the"}, accept=f"{RAW}; dtype=int4")
    assert (error_of(response), service.engine.runs) == ((422, "invalid_value"), before)
    ok(service.post("/embed", {"inputs": "the"}))
    assert service.engine.runs == before + 1


def test_an_error_of_the_engine_is_no_rejection(service: Service) -> None:
    assert error_of(service.post("/embed", {"inputs": "war"})) == (500, "engine_failed")
    assert service.seen.error == "engine_failed"
    assert service.seen.rejection is None


def test_a_full_queue_is_a_rejection(alone: Service) -> None:
    alone.queues[0].close()
    assert error_of(alone.post("/embed", {"inputs": "the"})) == (503, "shutting_down")
    assert alone.seen.rejection is Rejection.SHUTTING_DOWN
    assert alone.seen.error == "shutting_down"


def test_which_models_may_answer_a_route(tmp_path: Path) -> None:
    """The gate refuses requests while all of them are full; the first one is the default's."""
    masks = {"name": "masks", "tasks": ("fill-mask",), "embedding": None, "heads": {}}
    both = {"name": "both", "heads": RANKER["heads"], "tasks": ("text-classification", "embed")}
    with Service(tmp_path, [masks, {}, both]) as made:
        models = {
            route.path: None if route.models is None else [m.reference for m in route.models]
            for route in made.routes
            if (route.method, route.path) != ("GET", "/")
        }
        queues = {model.queue for route in made.routes for model in route.models or ()}
        assert queues == set(made.queues)
    every = ["masks@3", "tiny@3", "both@3"]
    embedding = ["tiny@3", "both@3"]
    assert models["/fill-mask"] == ["masks@3", "tiny@3"]
    assert models["/embed"] == models["/v1/embeddings"] == models["/embeddings"] == embedding
    assert models["/v2/embed"] == embedding
    assert models["/rerank"] == ["both@3", "tiny@3"]
    assert models["/predict"] == ["tiny@3", "both@3"]
    assert models["/tokenize"] == models["/decode"] == [*embedding, "masks@3"]
    assert models["/"] == models["/v2/models/{model}/infer"] == every
    assert models["/v2/models/{model}/versions/{version}/infer"] == every
    for path in ("/metrics", "/admin/reload", "/v1/models", "/v2", "/v2/models/{model}"):
        assert models[path] is None


@pytest.mark.parametrize(
    ("word", "prompt"),
    [
        ("retrieval.query", "ask :"), ("nl2code.query", "ask :"), ("retrieval.passage", None),
        ("classification", "the of"), ("separation", "in a"), ("clustering", "in a"),
        ("text-matching", None),
    ],
)  # fmt: skip
def test_a_task_chooses_the_prompt_of_a_model(
    tmp_path: Path, word: str, prompt: str | None
) -> None:
    """Of its role, or of its name in any case; else none. The engine's vector tells one token."""
    prompts = {"query": "ask : ", "Classification": "the of ", "clustering": "in a "}
    own = EMBEDDER | {"embedding": EMBEDDING | {"prompts": prompts}}
    with Service(tmp_path, [own]) as made:
        for path, field, texts in (
            ("/v1/embeddings", "task", "input"),
            ("/v2/embed", "input_type", "texts"),
        ):
            response = made.post(path, {texts: ["the"], field: word})
            assert response.status_code == 200, response.text
            assert made.seen.tokens == 3 + len(prompt.split() if prompt else ())
        spaces = [
            made.post("/v1/embeddings", {"input": "the", "task": one}).headers["x-embedding-space"]
            for one in (word, "text-matching")
        ]
        assert (len(set(spaces)) == 1) == (prompt is None)


COHERE = {"texts": ["the", "the king"], "model": "small", "input_type": "document"}


def infer(service: Service, model: str, *tensors: Any, **fields: Any) -> httpx.Response:
    return service.post(f"/v2/models/{model}/infer", {"inputs": list(tensors)} | fields)


def asked(name: str, **parameters: Any) -> dict[str, Any]:
    return {"outputs": [{"name": name, "parameters": parameters}]}


def test_bytes_in_and_out(service: Service) -> None:
    texts, contexts = packed("a é", "b"), packed("c", "d")
    tensors = [sized("question", len(texts), 2), sized("context", len(contexts), 2)]

    def ask(**fields: Any) -> tuple[httpx.Response, dict[str, Any], bytes]:
        content, headers = binary(tensors, texts + contexts, **fields)
        path = "/v2/models/tiny.qa/infer"
        response = service.ask("POST", path, content=content, headers=headers)
        assert response.status_code == 200, response.text
        length = int(response.headers.get("inference-header-content-length", 0))
        length = length or len(response.content)
        rows = json.loads(response.content[:length])["outputs"]
        return response, {row["name"]: row for row in rows}, response.content[length:]

    def output(name: str, **parameters: bool) -> dict[str, Any]:
        return {"name": name, "parameters": parameters} if parameters else {"name": name}

    some = [output("answer", binary_data=True), output("count", binary_data=True), output("start")]
    response, rows, rest = ask(outputs=some)
    assert response.headers["content-type"] == RAW
    assert rows["start"] == {"name": "start", "shape": [2], "datatype": "INT64", "data": [0, 0]}
    assert rows["answer"]["parameters"] == {"binary_data_size": 10}
    assert "data" not in rows["answer"]
    assert rest == struct.pack("<2q", 1, 1) + packed("c", "d")
    some = [output("count", binary_data=False), output("answer")]
    response, rows, rest = ask(outputs=some, parameters={"binary_data_output": True})
    assert (rows["count"]["data"], rest) == ([1, 1], packed("c", "d"))
    response, _, rest = ask()
    assert (response.headers["content-type"], rest) == ("application/json", b"")
    assert "inference-header-content-length" not in response.headers
    classes = asked("score", classification=1, binary_data=True)
    pair = [tensor("text", "a"), tensor("next", "b")]
    assert infer(service, "tiny.nsp", *pair, **classes).content.endswith(
        packed("0.880797:0:IsNext")
    )


def test_the_time_limit_of_triton_is_that_of_a_request(service: Service) -> None:
    text = tensor("text", "a")
    ok(infer(service, "tiny.embed", text, parameters={"timeout": 20_000_000}))
    assert service.seen.limit_s == 20
    late = infer(service, "tiny.embed", text, parameters={"timeout": 1})
    assert late.status_code in (429, 503, 504)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": ["a"] * 70}),
        ("/v1/embeddings", {"input": ["a"] * 70, "model": "tiny"}),
        ("/v2/embed", COHERE | {"texts": ["a"] * 70, "embedding_types": ["float", "base64"]}),
        ("/embed_all", {"inputs": ["a b c"] * 20, "return_offsets": True, "return_usage": True}),
        ("/v2/models/tiny.embed-all/infer", {"inputs": [tensor("text", *["a b c"] * 20)]}),
    ],
)
def test_large_vectors_are_written_in_parts(
    path: str, body: dict[str, Any], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written() -> bytes:
        answer = service.post(path, body, x_request_id="one")
        assert answer.status_code == 200
        return re.sub(rb'"created":\d+', b"", answer.content)  # a second may pass

    whole = written()
    monkeypatch.setattr(protocol, "_PART_NUMBERS", 8)
    parts = list[Any]()
    in_parts = protocol.json_parts
    monkeypatch.setattr(protocol, "json_parts", lambda value: parts.append(0) or in_parts(value))
    assert written() == whole
    assert parts
