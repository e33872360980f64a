"""Requests of every protocol to a service in this process: what is read, run and answered."""

import base64
import json
import re
import struct
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cloze.service.core import ServedRequest
from cloze.service.errors import Rejection
from cloze.service.http.bytes_held import Hold
from cloze.service.http.routes import RAW
from cloze.service.protocols import protocol
from cloze.service.tasks import TASKS
from tests.support.refusals import error_of
from tests.support.route_service import CLASSIFIER, EMBEDDER, OneLabel, Service
from tests.support.task_model import ID

RANKER = CLASSIFIER | {
    "name": "ranker",
    "heads": {"sequence_classification": {"labels": ["score"], "problem_type": "regression"}},
}
EMBEDDING = {
    "dimensions": 4, "pooling": "mean", "normalize": True, "max_tokens": 10, "projected": False,
}  # fmt: skip


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


def test_parameters_are_fields_of_the_body_or_an_object_in_it(service: Service) -> None:
    assert ok(service.post("/embed", {"inputs": "the", "normalize": False})) == [[3, 0, 4, 0]]
    assert len(ok(service.post("/embed_all", {"inputs": "the", "normalize": False}))[0]) == 3
    assert ok(service.post("/embed_sparse", {"inputs": "the", "top_k": 2}))[0][0]["index"] > 0
    similar = {"inputs": {"source_sentence": "a", "sentences": ["b c", "d"]}}
    assert ok(service.post("/similarity", similar)) == pytest.approx([0.8, 1.0])
    named = similar | {"parameters": {"normalise": True}}
    response = service.post("/similarity", named)
    assert response.headers["x-warning"] == "ignored unknown fields: parameters.normalise"
    masked = {"inputs": "a [MASK]"}
    assert len(ok(service.post("/fill-mask", masked))) == 5
    assert len(ok(service.post("/fill-mask", masked | {"parameters": {"top_k": 2}}))) == 2
    assert len(ok(service.post("/fill-mask", masked | {"parameters": None}))) == 5
    labels = {"inputs": "a", "parameters": {"top_k": 1}, "model": "tiny@2"}
    assert [row["label"] for row in ok(service.post("/classify", labels))[0]] == ["O"]


def test_which_routes_ignore_unknown_fields(service: Service) -> None:
    for path in ("/embed", "/embed_all", "/embed_sparse"):
        response = service.post(path, {"inputs": "the", "colour": 1})
        assert response.headers["x-warning"] == "ignored unknown fields: colour", path
    assert "x-warning" not in service.post("/embed", {"inputs": "the"}).headers
    for path in ("/fill-mask", "/nsp", "/qa", "/classify", "/token-classification", "/score"):
        response = service.post(path, {"inputs": "the [MASK]", "colour": 1})
        assert error_of(response) == (422, "invalid_body"), path
    response = service.post("/fill-mask", {"inputs": "[MASK]", "parameters": {"x": 1}})
    assert error_of(response) == (422, "invalid_body")


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


def test_the_model_that_a_request_names(service: Service) -> None:
    for model, served in (
        (None, "tiny@3"),
        ("tiny", "tiny@3"),
        ("tiny@2", "tiny@2"),
        ("small", "small@1"),
    ):
        ok(service.post("/embed", {"inputs": "the", "model": model}))
        assert service.seen.model == served
    missing = service.post("/embed", {"inputs": "a", "model": "x"})
    assert error_of(missing) == (404, "model_not_found")
    unable = service.post("/fill-mask", {"inputs": "[MASK]", "model": "small"})
    assert error_of(unable) == (424, "task_not_supported")


def test_a_large_answer_is_held_until_it_is_read(service: Service) -> None:
    many = {"inputs": [[n % 9 + 109 for n in range(8)]] * 290, "normalize": False}
    response = service.post("/embed_all", many)
    assert len(ok(response)) == 290
    assert len(response.content) > 65_536
    hold = service.seen.answer
    assert isinstance(hold, Hold)
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


def test_errors_of_the_engine_and_of_texts(service: Service) -> None:
    assert error_of(service.post("/embed", {"inputs": "war"})) == (500, "engine_failed")
    assert service.seen.error == "engine_failed"
    assert service.seen.rejection is None
    assert error_of(service.post("/embed", {"inputs": ""})) == (400, "empty_input")
    many = service.post("/embed", {"inputs": ["a"] * 301})
    assert error_of(many) == (422, "limit_exceeded")


def test_a_full_queue_is_a_rejection(alone: Service) -> None:
    alone.queues[0].close()
    assert error_of(alone.post("/embed", {"inputs": "the"})) == (503, "shutting_down")
    assert alone.seen.rejection is Rejection.SHUTTING_DOWN
    assert alone.seen.error == "shutting_down"


def test_vectors_in_the_format_that_is_accepted(service: Service) -> None:
    body = {"inputs": ["the", "a"], "normalize": False}
    response = service.post("/embed", body, accept=RAW)
    assert np.frombuffer(response.content, "<f4").tolist() == [3, 0, 4, 0] * 2
    assert response.headers["x-shape"] == "2,4"
    response = service.post("/embed_all", body, accept=RAW)
    assert (response.headers["x-lengths"], response.headers["x-shape"]) == ("3,3", "6,4")
    labels = service.post("/classify", {"inputs": "a"}, accept=f"{RAW}; dtype=int4")
    assert labels.status_code == 200, "only vectors have a dtype"


def dispatched(service: Service, inputs: Any, **fields: Any) -> set[str]:
    """Return the keys that the result of a task has at its beginning."""
    result = ok(service.post("/", {"inputs": inputs} | fields))
    while isinstance(result, list):
        result = result[0]
    return set(result) if isinstance(result, dict) else {type(result).__name__}


def test_the_body_chooses_the_task(service: Service) -> None:
    assert dispatched(service, "the") == {"float"}
    assert dispatched(service, ["the", "a"]) == {"float"}
    assert dispatched(service, [109, 110]) == {"float"}
    assert "token_str" in dispatched(service, "the [MASK]")
    assert "token_str" in dispatched(service, ["[MASK]", "a [MASK]"], parameters={"top_k": 1})
    assert dispatched(service, {"question": "a", "context": "b"}) >= {"answer", "start"}
    assert dispatched(service, [{"question": "a", "context": "b"}]) >= {"answer", "start"}
    assert dispatched(service, {"source_sentence": "a", "sentences": ["b"]}) == {"float"}
    assert dispatched(service, {"text": "a", "next": "b"}) == {"label", "score"}
    assert dispatched(service, {"text": "a", "text_pair": "b"}) == {"label", "score"}
    ok(service.post("/", {"inputs": "the", "model": "small"}))
    assert service.seen.model == "small@1"


def test_bodies_that_fit_no_task(service: Service) -> None:
    for body, code in (
        ({"inputs": {"x": 1}}, "invalid_value"),
        ({"inputs": "a", "parameters": {}}, "invalid_value"),
        ({}, "invalid_body"),
        ({"inputs": "the", "normalize": 1}, "invalid_body"),
    ):
        assert error_of(service.post("/", body)) == (422, code)
    assert error_of(service.ask("POST", "/", content=b"{")) == (400, "malformed_body")


def test_what_is_served_chooses_between_tasks_with_equal_bodies(tmp_path: Path) -> None:
    with Service(tmp_path, [CLASSIFIER]) as one:
        assert dispatched(one, "a", parameters={}) == {"label", "score"}
        assert error_of(one.post("/", {"inputs": "[MASK]"})) == (424, "task_not_supported")
    with Service(tmp_path, [EMBEDDER]) as neither:
        unclear = neither.post("/", {"inputs": "a", "parameters": {}})
        assert error_of(unclear) == (422, "invalid_value")
    offered = {"embed": TASKS["embed"], "qa": TASKS["qa"]}
    with Service(tmp_path, tasks=offered) as few:
        assert dispatched(few, "[MASK]") == {"float"}, "nobody offers fill-mask"
        assert error_of(few.post("/", {"inputs": {"next": "a"}})) == (422, "invalid_value")
        assert dispatched(few, {"question": "a", "context": "b"}) >= {"answer"}
        assert few.post("/predict", {"inputs": "a"}).status_code == 404
        assert few.post("/decode", {"ids": [5]}).status_code == 200
    with Service(tmp_path, tasks={"fill-mask": TASKS["fill-mask"]}) as masks:
        assert error_of(masks.post("/", {"inputs": "a"})) == (424, "task_not_supported")


def test_rerank_needs_both_of_its_tasks(tmp_path: Path) -> None:
    with Service(tmp_path, tasks={"text-classification": TASKS["text-classification"]}) as made:
        assert made.post("/rerank", {"query": "a", "texts": ["b"]}).status_code == 404
        assert made.post("/predict", {"inputs": "a"}).status_code == 200


PAIR = {"source_sentence": "a", "sentences": ["b"]}


def test_scores_say_what_they_are(service: Service) -> None:
    """See `test_operations.py` for the kind of every task."""
    labels = {"inputs": "a", "parameters": {"function_to_apply": "none"}}
    cohere = {"texts": ["a"], "model": "tiny", "input_type": "query"}
    for path, body, kind in (
        ("/redact", {"inputs": "a"}, "probability"),
        ("/classify", {"inputs": "a"}, "probability"),
        ("/classify", labels, "raw score"),
        ("/similarity", {"inputs": PAIR}, "cosine"),
        ("/rerank", {"query": "a", "texts": ["b"]}, "cosine"),
        ("/score", {"inputs": "a"}, "log-probability"),
        ("/embed", {"inputs": "a"}, None),
        ("/v2/embed", cohere, None),
    ):
        response = service.post(path, body)
        ok(response)
        assert response.headers.get("x-score-kind") == kind, path


def test_labels_of_predict(service: Service) -> None:
    one = ok(service.post("/predict", {"inputs": "a"}))
    assert [row["label"] for row in one] == ["O", "B-PER", "LOC", "I-PER"]
    assert one[3]["score"] < 0.1
    assert ok(service.post("/predict", {"inputs": ["a"]})) == one
    raw = ok(service.post("/predict", {"inputs": ["a", "b"], "raw_scores": True}))
    assert raw[0] == {"label": "O", "score": 5.0}, "a pair is one sequence"
    batch = ok(service.post("/predict", {"inputs": [["a"], ["a", "b"]], "raw_scores": True}))
    assert [rows[0]["score"] for rows in batch] == [3.0, 5.0]
    response = service.post("/predict", {"inputs": "a", "top_n": 3})
    assert response.headers["x-warning"] == "ignored unknown fields: top_n"
    long = {"inputs": "a b c d e f g h i j k", "truncate": False}
    assert error_of(service.post("/predict", long)) == (422, "text_too_long")
    ok(service.post("/predict", long | {"truncate": True}))
    for wrong in ({"inputs": []}, {"inputs": [["a", "b", "c"]]}, {"inputs": ["a", "b", "c"]}, {}):
        assert service.post("/predict", wrong).status_code in (400, 422)


@pytest.mark.parametrize("path", ["/predict", "/classify", "/embed", "/embed_all", "/embed_sparse"])
def test_the_end_that_is_cut(service: Service, path: str) -> None:
    """The engine fails on the first word unless it is cut."""

    def ask(**parameters: Any) -> httpx.Response:
        given = {"parameters": parameters} if path == "/classify" else parameters
        return service.post(path, {"inputs": "war a b c d e f g h i j k"} | given)

    assert ask().status_code == 500
    assert ask(truncation_direction="left").status_code == 200
    assert ask(truncation_direction="right").status_code == 500
    assert error_of(ask(truncate=False)) == (422, "text_too_long")


def test_how_a_long_text_is_cut_in_cohere_s_words(service: Service) -> None:
    texts = ["war a b c d e f g h i j k"]
    body = {"model": "tiny", "input_type": "search_query", "texts": texts}
    for truncate, answer in (
        ("NONE", (400, "text_too_long")),
        ("END", (500, "engine_failed")),
        (None, (500, "engine_failed")),
    ):
        assert error_of(service.post("/v2/embed", body | {"truncate": truncate})) == answer
    assert service.post("/v2/embed", body | {"truncate": "START"}).status_code == 200


def test_ranks_by_embeddings(service: Service) -> None:
    body = {"query": "a", "texts": ["b c", "d"]}
    response = service.post("/rerank", body)
    assert response.headers["x-ranked-by"] == "similarity"
    assert response.headers["content-type"] == "application/json"
    rows = ok(response)
    assert [row["index"] for row in rows] == [0, 1]
    assert rows[0].keys() == {"index", "score"}
    rows = ok(service.post("/rerank", body | {"return_text": True}))
    assert [row["text"] for row in rows] == ["b c", "d"]
    response = service.post("/rerank", body | {"truncation": 1})
    assert response.headers["x-warning"] == "ignored unknown fields: truncation"
    long = {"query": "a", "texts": ["a b c d e f g h i j k l"], "truncate": False}
    refused = service.post("/rerank", long)
    assert error_of(refused) == (422, "text_too_long")
    assert refused.json()["error"].startswith("texts[0] ")
    refused = service.post("/rerank", {"query": "a", "texts": []})
    assert error_of(refused) == (400, "empty_input")


def test_a_classifier_of_one_label_ranks_first(tmp_path: Path) -> None:
    body = {"query": "a", "texts": ["b", "c d"], "raw_scores": True}
    with Service(tmp_path, [{}, RANKER]) as made:
        made.queues[1]._engine = OneLabel()  # type: ignore[attr-defined]
        response = made.post("/rerank", body)
        assert response.headers["x-ranked-by"] == "classifier"
        assert ok(response) == [{"index": 1, "score": 6.0}, {"index": 0, "score": 5.0}]
        long = body | {"texts": ["b", "a b c d e f g h i j k l"], "truncate": False}
        refused = made.post("/rerank", long)
        assert error_of(refused) == (422, "text_too_long")
        assert refused.json()["error"].startswith("texts[1] ")
        response = made.post("/rerank", body | {"model": "tiny"})
        assert response.headers["x-ranked-by"] == "similarity"


def test_tokens_and_texts(service: Service) -> None:
    [tokens] = ok(service.post("/tokenize", {"inputs": "the é"}))
    assert [(t["text"], t["special"], t["start"], t["stop"]) for t in tokens] == [
        ("[CLS]", True, None, None), ("the", False, 0, 3), ("é", False, 4, 6),
        ("[SEP]", True, None, None),
    ]  # fmt: skip
    plain = {"inputs": ["the"], "prompt_name": "query", "add_special_tokens": False}
    [tokens] = ok(service.post("/tokenize", plain))
    assert [token["text"] for token in tokens] == ["ask", ":", "the"]
    assert ok(service.post("/decode", {"ids": [[109], [109, 3]]})) == ["the", "the"]
    kept = ok(service.post("/decode", {"ids": [109, 3], "skip_special_tokens": False}))
    assert kept == ["the [SEP]"]
    refused = service.post("/decode", {"ids": [-1]})
    assert error_of(refused) == (422, "invalid_value")
    assert refused.json()["error"].startswith("ids ")
    for path, body in (("/tokenize", {"inputs": "the"}), ("/decode", {"ids": [5]})):
        response = service.post(path, body | {"model": "small", "x": 1})
        assert response.headers["x-warning"] == "ignored unknown fields: x"
        assert service.seen.model == "small@1"


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


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_embeddings_in_openai_s_shape(service: Service, path: str) -> None:
    body = {"input": ["the", "the king"], "model": "small"}
    answer = ok(service.post(path, body))
    assert answer.keys() == {"id", "object", "created", "data", "model", "usage"}
    assert (answer["object"], answer["model"]) == ("list", "small")
    assert answer["id"] == f"embd-{service.seen.identity.decode()}"
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    first, second = answer["data"]
    assert (first["object"], first["index"], second["index"]) == ("embedding", 0, 1)
    assert first["embedding"] == pytest.approx([0.6, 0, 0.8, 0])
    encoded = ok(service.post(path, body | {"encoding_format": "base64"}))["data"][1]
    vector = np.frombuffer(base64.b64decode(encoded["embedding"]), "<f4")
    assert vector.tolist() == [0, 0, 1, 0]
    for same in ({"encoding_format": "float"}, {"encoding_format": None}, {"modality": "text"}):
        response = service.post(path, body | same)
        assert ok(response)["data"] == answer["data"]
    assert response.headers["x-warning"] == "ignored unknown fields: modality"
    for unnamed in ({"model": None}, {}):
        assert ok(service.post(path, {"input": "the"} | unnamed))["model"] == "tiny@3"
    cut = ok(service.post(path, body | {"dimensions": 2, "user": "me"}))["data"][0]
    assert cut["embedding"] == [1, 0]
    assert len(ok(service.post(path, {"input": [109, 110], "model": "tiny"}))["data"]) == 1


def test_embeddings_in_the_types_of_voyage_and_jina(service: Service) -> None:
    def vectors(**fields: Any) -> list[Any]:
        body = {"input": ["the", "the king"], "model": "small"} | fields
        return [row["embedding"] for row in ok(service.post("/v1/embeddings", body))["data"]]

    for named in ({"output_dtype": "ubinary"}, {"embedding_type": ["ubinary"]}):
        assert vectors(**named) == [[0xA0], [0x20]]
    assert vectors(encoding_type="binary") == [[32], [-96]]
    assert vectors(output_dtype="int8") == [[95, 0, 127, 0], [0, 0, 127, 0]]
    assert vectors(output_dtype="uint8") == [[223, 128, 255, 128], [128, 128, 255, 128]]
    encoded = vectors(encoding_format="base64", output_dtype="binary")
    assert [np.frombuffer(base64.b64decode(one), np.int8).tolist() for one in encoded] == [
        [32],
        [-96],
    ]
    assert vectors(input=[{"text": "the"}, {"text": "of a"}]) == vectors(input=["the", "of a"])


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


def test_late_chunking_embeds_the_texts_as_parts_of_one(service: Service) -> None:
    """The engine's vector of a token is its id."""
    body = {"input": ["the of", "a", "in"], "model": "tiny", "normalized": False}
    rows = ok(service.post("/v1/embeddings", body | {"late_chunking": True}))["data"]
    expected = [(ID["the"] + ID["of"]) / 2, ID["a"], ID["in"]]
    assert [row["embedding"][0] for row in rows] == expected
    assert service.seen.tokens == 6
    same = ok(service.post("/v1/embeddings", body | {"late_chunking": False}))["data"]
    assert same == ok(service.post("/v1/embeddings", body))["data"] != rows
    for wrong, code, begin in (
        ({"input": "the"}, "invalid_value", "input must be a list of texts"),
        ({"input": [[5, 6]]}, "invalid_value", "input must be a list of texts"),
        ({"input": ["a", ""]}, "empty_input", "input[1] is empty"),
        ({"input": ["a " * 12, "of"]}, "invalid_value", "input[1] has no token among the 10 "),
        ({"input": ["a"] * 301}, "limit_exceeded", "input has 301 "),
    ):
        response = service.post("/v1/embeddings", body | {"late_chunking": True} | wrong)
        assert error_of(response) == (400, code)
        assert response.json()["error"]["message"].startswith(begin)


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"input": ""}, 400, "empty_input"),
        ({"model": "x"}, 404, "model_not_found"),
        ({"dimensions": 9}, 400, "invalid_value"),
        ({"encoding_format": "hex"}, 400, "invalid_body"),
        ({"output_dtype": "int4"}, 400, "invalid_body"),
        ({"output_dtype": "int8", "encoding_format": "bytes"}, 400, "invalid_value"),
        ({"input": ["a"] * 257, "encoding_format": "bytes"}, 400, "invalid_value"),
        ({"task": "poetry"}, 400, "invalid_value"),
        ({"input": [{"image": "data:"}]}, 400, "invalid_body"),
    ],
)
def test_errors_in_openai_s_shape(
    service: Service, fields: dict[str, Any], status: int, code: str
) -> None:
    for path in ("/v1/embeddings", "/embeddings"):
        response = service.post(path, {"input": "a", "model": "tiny"} | fields)
        error = response.json()["error"]
        assert error_of(response) == (status, code)
        assert error["type"] == "invalid_request_error"
        assert error["code"] == ("model_not_found" if status == 404 else None)


def test_models_in_openai_s_shape(service: Service) -> None:
    rows = ok(service.get("/v1/models"))
    assert rows.keys() == {"object", "data"}
    assert rows["object"] == "list"
    names = ["tiny@3", "tiny", "small@1", "small", "tiny@2"]
    assert [row["id"] for row in rows["data"]] == names
    assert ok(service.get("/models")) == rows
    one = {"id": "tiny@3", "object": "model", "created": 1_767_225_600, "owned_by": "cloze"}
    one |= {"type": "base", "capabilities": {}}  # for Mistral's clients
    one |= {name: rows["data"][0][name] for name in ("embedding_space", "embedding_spaces")}
    assert one["embedding_spaces"]["embed"] == one["embedding_space"]
    assert rows["data"][0] == one
    kserve = {"name": "tiny", "ready": True, "model_type": "embedding"}
    for name in ("tiny", "tiny%403"):
        assert ok(service.get(f"/v1/models/{name}")) == one | kserve
    missing = service.get("/v1/models/x")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert service.get("/v1/x").json()["error"]["type"] == "invalid_request_error"


COHERE = {"texts": ["the", "the king"], "model": "small", "input_type": "document"}


def test_embeddings_in_cohere_s_shape(service: Service) -> None:
    response = service.post("/v2/embed", COHERE)
    answer = ok(response)
    assert answer == {
        "id": answer["id"],
        "response_type": "embeddings_by_type",
        "embeddings": {"float": [pytest.approx([0.6, 0, 0.8, 0]), [0, 0, 1, 0]]},
        "texts": ["the", "the king"],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 7}},
    }
    assert answer["id"] == service.seen.identity.decode()
    asked = COHERE | {"embedding_types": ["ubinary", "binary", "base64"]}
    kinds = ok(service.post("/v2/embed", asked))["embeddings"]
    assert (kinds["ubinary"], kinds["binary"]) == ([[0xA0], [0x20]], [[32], [-96]])
    integers = ok(service.post("/v2/embed", COHERE | {"embedding_types": ["int8", "uint8"]}))
    assert integers["embeddings"]["int8"][1] == [0, 0, 127, 0]
    assert integers["embeddings"]["uint8"][1] == [128, 128, 255, 128]
    tokens = ok(service.post("/v1/tokenize", {"text": "the of", "model": "small"}))
    assert tokens["token_strings"] == ["the", "of"]
    assert tokens["tokens"] == [ID["the"], ID["of"]]
    assert error_of(service.post("/v1/tokenize", {"text": ""})) == (400, "empty_input")
    vector = np.frombuffer(base64.b64decode(kinds["base64"][1]), "<f4")
    assert vector.tolist() == [0, 0, 1, 0]
    cut = ok(service.post("/v2/embed", COHERE | {"output_dimension": 2, "priority": 3}))
    assert cut["embeddings"]["float"][0] == [1, 0]
    inputs = [{"content": [{"type": "text", "text": text}]} for text in COHERE["texts"]]
    same = ok(service.post("/v2/embed", COHERE | {"texts": None, "inputs": inputs}))
    assert same == answer | {"id": same["id"]}
    response = service.post("/v2/embed", {"texts": ["the"], "input_type": None, "more": 1})
    assert ok(response)["embeddings"]["float"] == answer["embeddings"]["float"][:1]
    assert response.headers["x-warning"] == "ignored unknown fields: more"


def test_embeddings_of_version_1_of_cohere_s_api(service: Service) -> None:
    floats = ok(service.post("/v1/embed", COHERE | {"truncate": None}))
    assert floats == {
        "id": floats["id"],
        "response_type": "embeddings_floats",
        "embeddings": [pytest.approx([0.6, 0, 0.8, 0]), [0, 0, 1, 0]],
        "texts": ["the", "the king"],
        "meta": {"api_version": {"version": "1"}, "billed_units": {"input_tokens": 7}},
    }
    named = ok(service.post("/v1/embed", COHERE | {"embedding_types": ["float", "ubinary"]}))
    assert named["response_type"] == "embeddings_by_type"
    assert named["embeddings"] == {"float": floats["embeddings"], "ubinary": [[0xA0], [0x20]]}


PART = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"texts": ["a", ""]}, 400, "empty_input"),
        ({"texts": "a"}, 400, "invalid_body"),
        ({"texts": None}, 400, "invalid_value"),
        ({"texts": None, "inputs": [{"content": [PART | {"text": ""}]}]}, 400, "empty_input"),
        ({"texts": None, "inputs": [{"content": [IMAGE]}]}, 400, "invalid_body"),
        ({"images": ["data:"]}, 400, "invalid_value"),
        ({"input_type": "image"}, 400, "invalid_value"),
        ({"embedding_types": ["int4"]}, 400, "invalid_body"),
        ({"output_dimension": 9}, 400, "invalid_value"),
        ({"model": "x"}, 404, "model_not_found"),
    ],
)
def test_errors_in_cohere_s_shape(
    service: Service, fields: dict[str, Any], status: int, code: str
) -> None:
    for path in ("/v1/embed", "/v2/embed"):
        response = service.post(path, COHERE | fields)
        assert error_of(response) == (status, code)
        assert response.json().keys() == {"message"}


def tensor(name: str, *texts: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)} | fields


def infer(service: Service, model: str, *tensors: Any, **fields: Any) -> httpx.Response:
    return service.post(f"/v2/models/{model}/infer", {"inputs": list(tensors)} | fields)


def test_an_answer_in_tensors(service: Service) -> None:
    answer = ok(infer(service, "tiny.embed", tensor("text", "the", "a b"), id="mine"))
    assert answer == {
        "model_name": "tiny.embed", "model_version": "3", "id": "mine",
        "outputs": [
            {"name": "embedding", "shape": [2, 4], "datatype": "FP32",
             "data": pytest.approx([0.6, 0, 0.8, 0, 0, 0, 1, 0])},
            {"name": "count", "shape": [2], "datatype": "INT64", "data": [1, 1]},
        ],
    }  # fmt: skip
    answer = ok(infer(service, "small.embed", tensor("text", "the"), outputs=[{"name": "count"}]))
    assert "id" not in answer
    assert [row["name"] for row in answer["outputs"]] == ["count"]
    every = ok(infer(service, "small.embed", tensor("text", "the"), outputs=[]))
    assert len(every["outputs"]) == 2
    older = ok(
        service.post("/v2/models/tiny.embed/versions/2/infer", {"inputs": [tensor("text", "a")]})
    )
    assert older["model_version"] == "2"
    assert service.seen.model == "tiny@2"
    parameters = {"parameters": {"normalize": False}}
    assert ok(infer(service, "tiny.embed", tensor("text", "a"), **parameters))["outputs"][0][
        "data"
    ] == [3, 0, 4, 0]
    column = tensor("text", "a", "b", shape=[2, 1], data=[["a"], ["b"]])
    assert ok(infer(service, "tiny.embed", column))["outputs"][1]["data"] == [1, 1]
    labels = ok(infer(service, "tiny.text-classification", tensor("text", "a")))["outputs"]
    assert [row["name"] for row in labels] == ["result", "count", "label", "score"]
    assert labels[2]["data"][0] == "O"


def binary(tensors: list[dict[str, Any]], packed: bytes, **fields: Any) -> dict[str, Any]:
    """Return the options of a request with bytes after its JSON."""
    head = json.dumps({"inputs": tensors} | fields).encode()
    return {
        "content": head + packed,
        "headers": {"inference-header-content-length": str(len(head))},
    }


def packed(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def sized(name: str, size: Any, count: int) -> dict[str, Any]:
    parameters = {"binary_data_size": size}
    return {"name": name, "shape": [count], "datatype": "BYTES", "parameters": parameters}


def test_bytes_in_and_out(service: Service) -> None:
    texts, contexts = packed("a é", "b"), packed("c", "d")
    tensors = [sized("question", len(texts), 2), sized("context", len(contexts), 2)]

    def ask(**fields: Any) -> tuple[httpx.Response, dict[str, Any], bytes]:
        options = binary(tensors, texts + contexts, **fields)
        response = service.ask("POST", "/v2/models/tiny.qa/infer", **options)
        assert response.status_code == 200, response.text
        length = int(response.headers.get("inference-header-content-length", 0))
        length = length or len(response.content)
        rows = json.loads(response.content[:length])["outputs"]
        return response, {row["name"]: row for row in rows}, response.content[length:]

    def output(name: str, **parameters: bool) -> dict[str, Any]:
        return {"name": name, "parameters": parameters} if parameters else {"name": name}

    asked = [output("answer", binary_data=True), output("count", binary_data=True), output("start")]
    response, rows, rest = ask(outputs=asked)
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


NSP = [tensor("text", "a"), tensor("next", "b")]


def asked(name: str, **parameters: Any) -> dict[str, Any]:
    return {"outputs": [{"name": name, "parameters": parameters}]}


def test_scores_of_labels_are_asked_for_as_classes(service: Service) -> None:
    """With the index of each label in the model, as Triton's clients read them."""

    def classes(task: str, most: int, **more: Any) -> tuple[list[int], list[str]]:
        texts = [tensor("text", "a", "a b c"), *more.pop("inputs", [])]
        fields = asked("score", classification=most) | more
        [row] = ok(infer(service, f"tiny.{task}", *texts, **fields))["outputs"]
        assert (row["name"], row["datatype"]) == ("score", "BYTES")
        return row["shape"], [re.sub(r"^[0-9.]+:", "", text) for text in row["data"]]

    assert classes("nsp", 9, inputs=[tensor("next", "b", "b")]) == (
        [2, 2], ["0:IsNext", "1:NotNext"] * 2,
    )  # fmt: skip
    best = ok(infer(service, "tiny.text-classification", tensor("text", "a")))["outputs"]
    shape, named = classes("text-classification", 2)
    assert shape == [2, 2]
    assert named[0] == f"0:{best[2]['data'][0]}"
    assert named[1].startswith("1:")
    binary_one = asked("score", classification=1, binary_data=True)
    response = infer(service, "tiny.nsp", *NSP, **binary_one)
    assert response.content.endswith(packed("0.880797:0:IsNext"))


def test_what_other_clients_send_is_read_or_named(service: Service) -> None:
    """KServe's name of the model, Triton's parameters, and MLServer's codecs and nulls."""
    typed = (("str", ["the"]), ("np", ["the"]), ("base64", ["dGhl"]), ("hg_json", ['["the"]']),
             ("hg_jsonlist", ['"the"']), ("json", ['"the"']), (None, ["the"]))  # fmt: skip
    for kind, data in typed:
        sent = tensor("text", *data, parameters=kind and {"content_type": kind})
        response = infer(service, "tiny.embed", sent, model_name="tiny.embed", outputs=None)
        assert ok(response)["outputs"][0]["data"] == pytest.approx([0.6, 0, 0.8, 0]), kind
        assert "x-warning" not in response.headers
    several = tensor("text", '["the", "a b"]', parameters={"content_type": "hg_json"})
    assert ok(infer(service, "tiny.embed", several))["outputs"][0]["shape"] == [2, 4]
    sent = tensor("text", "a", parameters={"test": 1}, more=2)
    parameters = {"priority": 1, "sequence_id": 7, "normalize": False, "timeout": 20_000_000}
    fields = asked("embedding", content_type="np") | {"parameters": parameters, "model_name": "x"}
    response = infer(service, "tiny.embed", sent, **fields)
    assert ok(response)["outputs"][0]["data"] == [3, 0, 4, 0]
    assert service.seen.limit_s == 20
    assert response.headers["x-warning"] == (
        "ignored unknown fields: model_name, unlike the path's, inputs.more, "
        "inputs.parameters.test, outputs.parameters.content_type, parameters.priority, "
        "parameters.sequence_id"
    )
    late = infer(service, "tiny.embed", tensor("text", "a"), parameters={"timeout": 1})
    assert late.status_code in (429, 503, 504)


@pytest.mark.parametrize(
    ("model", "tensors", "fields", "status", "code"),
    [
        ("tiny.x", [], {}, 404, "model_not_found"),
        ("small.qa", [], {}, 404, "model_not_found"),
        ("tiny.embed", [], {}, 400, "invalid_value"),
        ("tiny.embed", [tensor("text", "a"), tensor("text", "b")], {}, 400, "invalid_value"),
        ("tiny.embed", [tensor("text", "a", shape=[2])], {}, 400, "invalid_value"),
        ("tiny.embed", [tensor("text", "a", shape=[1, 2])], {}, 400, "invalid_value"),
        ("tiny.embed", [tensor("text", "a")], {"outputs": [{"name": "x"}]}, 400, "invalid_value"),
        ("tiny.embed", [tensor("text", "a")], {"parameters": {"timeout": -1}}, 400, "invalid_value"),
        ("tiny.embed", [tensor("text", "a", parameters={"content_type": "pd"})], {}, 400,
         "invalid_value"),
        ("tiny.embed", [tensor("text", "{}", parameters={"content_type": "hg_json"})], {}, 400,
         "invalid_value"),
        ("tiny.embed", [tensor("text", "[", parameters={"content_type": "json"})], {}, 400,
         "invalid_value"),
        ("tiny.embed", [tensor("text", "a", parameters={"shared_memory_region": "r"})], {}, 400,
         "invalid_value"),
        ("tiny.embed", [tensor("text", "a")], asked("embedding", classification=1), 400,
         "invalid_value"),
        ("tiny.nsp", NSP, asked("label", classification=1), 400, "invalid_value"),
        ("tiny.nsp", NSP, asked("score", classification=0), 400, "invalid_body"),
        ("tiny.nsp", NSP, asked("score", binary_data="yes"), 400, "invalid_body"),
        ("tiny.embed", [sized("text", 1, 1)], {}, 400, "invalid_value"),
        ("tiny.embed", [sized("text", -1, 1)], {}, 400, "invalid_value"),
        ("tiny.embed", [sized("text", 0, 1) | {"data": ["a"]}], {}, 400, "invalid_value"),
        ("tiny.embed", [tensor("text", "a")], {"id": "x" * 1025}, 400, "invalid_body"),
        ("tiny.embed", [tensor("text", "a", shape=[1] * 9)], {}, 400, "invalid_body"),
    ],
)  # fmt: skip
def test_requests_of_tensors_that_are_refused(
    service: Service, model: str, tensors: list[Any], fields: dict[str, Any], status: int, code: str
) -> None:
    response = infer(service, model, *tensors, **fields)
    assert error_of(response) == (status, code)
    assert response.json().keys() == {"error"}


def test_bytes_that_are_refused(service: Service) -> None:
    texts = packed("a", "b", "c", "d")
    for options, code in (
        (binary([sized("text", 5, 1)], packed("a") + b"xyz"), "invalid_value"),
        (binary([sized("text", len(texts), 4)], texts), "limit_exceeded"),
        (binary([sized("text", 5, 1), sized("more", 7, 1)], packed("a") + b"123"), "invalid_value"),
        (binary([sized("text", 6, 1)], packed("a")), "invalid_value"),
    ):
        response = service.ask("POST", "/v2/models/tiny.embed/infer", **options)
        assert error_of(response) == (400, code)


def test_what_is_said_of_a_model(service: Service) -> None:
    assert ok(service.get("/v2")) == {
        "name": "cloze", "version": version("cloze-server"), "extensions": ["binary_tensor_data", "classification"],
    }  # fmt: skip
    assert ok(service.get("/v2/models"))["models"][-2:] == ["small.embed", "small.similarity"]
    assert len(ok(service.get("/v2/models"))["models"]) == len(TASKS) + 1, "each name once"
    text = {"name": "text", "datatype": "BYTES", "shape": [-1]}
    described = ok(service.get("/v2/models/tiny.embed"))
    assert described == {
        "name": "tiny.embed", "versions": ["3", "2"], "platform": "onnxruntime_onnx",
        "inputs": [text],
        "outputs": [
            {"name": "embedding", "datatype": "FP32", "shape": [-1, -1]},
            {"name": "count", "datatype": "INT64", "shape": [-1]},
        ],
    }  # fmt: skip
    assert ok(service.get("/v2/models/small.embed"))["versions"] == ["1"]
    assert ok(service.get("/v2/models/tiny.embed/versions/2"))["name"] == "tiny.embed"
    assert service.get("/v2/models/tiny.embed/versions/9").status_code == 404
    assert ok(service.get("/v2/models/tiny%2Eembed/ready")) == {"name": "tiny.embed", "ready": True}
    assert ok(service.get("/v2/models/tiny.embed/versions/3/ready"))["ready"] is True
    assert service.get("/v2/models/x.embed/ready").status_code == 404


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
