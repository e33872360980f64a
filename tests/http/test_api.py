"""The wire: bad input in every form gets its status, its shape and its reason; released clients
understand us.
"""

import gzip
import http.client
import json
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

from tests.support.refusals import error_of
from tests.support.serving import Server

JSON = dict[str, Any]
PAIR = {"question": "who?", "context": "the king"}


def call(server: Server, route: str, content: bytes | None = None, **body: Any) -> httpx.Response:
    data = content if content is not None else json.dumps(body).encode()
    return httpx.post(
        server.url + route, content=data, headers={"content-type": "application/json"}, timeout=30
    )


def test_control_characters_are_cleaned_as_bert_cleans_them(server: Server) -> None:
    """NUL and U+FFFD disappear; so does nothing else."""
    plain = call(server, "/embed", inputs="the king").json()
    assert call(server, "/embed", inputs="the\x00 ki\x00ng\ufffd").json() == plain
    assert call(server, "/embed", inputs="\x00").status_code == 200


def test_the_same_server_still_works_after_all_that(server: Server) -> None:
    assert call(server, "/embed", inputs="the king").status_code == 200
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_truncation_is_reported_and_can_be_turned(server: Server) -> None:
    long = "king " + "a " * 300 + "moon"
    response = call(server, "/embed", inputs=[long, "a", long])
    assert response.headers["x-truncated"] == "2"
    assert int(response.headers["x-compute-tokens"]) == 160 + 3 + 160
    left = call(server, "/embed", inputs=long, truncation_direction="Left")
    assert left.headers["x-truncated"] == "1"
    assert left.json() != response.json()[:1]
    assert left.json() == call(server, "/embed", inputs="a " * 157 + "moon").json()
    assert call(server, "/embed", inputs="a").headers["x-truncated"] == "0"
    assert call(server, "/nsp", inputs={"text": long, "next": long}).headers["x-truncated"] == "1"
    assert (
        call(server, "/qa", inputs={"question": "who " * 100, "context": "the king"}).headers[
            "x-truncated"
        ]
        == "1"
    )
    assert (
        call(server, "/qa", inputs={"question": "who", "context": long}).headers["x-truncated"]
        == "0"
    ), "windows read it all"


def test_answers_say_where_the_time_went(server: Server) -> None:
    headers = call(server, "/fill-mask", inputs="the [MASK]").headers
    for name in (
        "x-compute-time",
        "x-total-time",
        "x-tokenization-time",
        "x-queue-time",
        "x-inference-time",
    ):
        assert 0 <= int(headers[name]) < 10_000
    assert headers["x-compute-tokens"] == "4"


def test_a_request_id_is_echoed_if_it_is_harmless(server: Server) -> None:
    assert (
        httpx.get(f"{server.url}/healthz", headers={"x-request-id": "abc-1"}).headers[
            "x-request-id"
        ]
        == "abc-1"
    )
    assert (
        httpx.get(f"{server.url}/healthz", headers={"x-request-id": "a b\tc"}).headers[
            "x-request-id"
        ]
        != "a b\tc"
    )


def test_a_model_is_chosen_by_name_version_or_default(server: Server) -> None:
    default = call(server, "/embed", inputs="the king").json()
    assert call(server, "/embed", inputs="the king", model="bert").json() == default
    assert call(server, "/embed", inputs="the king", model="bert@1").json() == default
    assert call(server, "/embed", inputs="the king", model="distilbert").json() != default


def test_a_request_may_have_as_many_texts_as_it_may(server: Server) -> None:
    response = call(server, "/embed", inputs=["the king"] * 2048)
    assert response.status_code == 200
    assert len(response.json()) == 2048


def test_probes_are_answered_while_a_huge_text_is_tokenized(server: Server) -> None:
    """By order, not by the clock: several probes come back before the text does."""
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=30) as probes:
        huge = pool.submit(call, server, "/embed", inputs=["the king " * 110_000] * 8)
        for _ in range(5):
            assert probes.get("/healthz").status_code == 200
        assert not huge.done()
        assert huge.result().headers["x-truncated"] == "8"


def compressed(server: Server, content: bytes, encoding: str = "gzip") -> httpx.Response:
    headers = {"content-encoding": encoding}
    return httpx.post(f"{server.url}/embed", content=content, headers=headers, timeout=30)


def test_bodies_may_be_compressed(server: Server) -> None:
    body = json.dumps({"inputs": "the king"}).encode()
    plain = call(server, "/embed", content=body).json()
    two_members = gzip.compress(body[:9]) + gzip.compress(body[9:])
    for content, encoding in (
        (gzip.compress(body), "gzip"),
        (two_members, "GZip"),
        (body, "identity"),
    ):
        response = compressed(server, content, encoding)
        assert (response.status_code, response.json()) == (200, plain)


@pytest.mark.parametrize(
    ("content", "encoding", "status", "code"),
    [
        (b"{}", "br", 415, "unsupported_encoding"),
        (b"{}", "gzip, gzip", 415, "unsupported_encoding"),
        (b"{}", "gzip", 400, "malformed_body"),
        (gzip.compress(b"{}", mtime=0)[:-3], "gzip", 400, "malformed_body"),
        (b"", "gzip", 400, "malformed_body"),
        (gzip.compress(b" " * 2**28), "gzip", 413, "body_too_large"),
    ],
)
def test_bad_compression_is_told(
    server: Server, content: bytes, encoding: str, status: int, code: str
) -> None:
    response = compressed(server, content, encoding)
    assert error_of(response) == (status, code)
    assert response.headers.get("accept-encoding") == ("gzip" if status == 415 else None)


def test_an_announced_length_is_refused_before_the_body_comes(server: Server) -> None:
    """Otherwise the client would wait for the server, and the server for the body."""
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /embed HTTP/1.1\r\nhost: {host}\r\ncontent-length: 9000000\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode())
        answer = b""
        while b"limit is" not in answer:
            answer += connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the body has 9000000 bytes; the limit is 8388608" in answer


def test_chunked_bodies_are_bounded_too(server: Server) -> None:
    def chunks() -> Any:
        yield b'{"inputs": "'
        for _ in range(200):
            yield b"a" * 65536
        yield b'"}'

    response = httpx.post(f"{server.url}/embed", content=chunks(), timeout=30)
    assert error_of(response) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("application/json, application/octet-stream;q=0.1", "application/json"),
        ("application/octet-stream;q=0, application/json", "application/json"),
        ("application/octet-stream;q=0", "application/json"),
        ("application/x-npy;q=0.5, application/octet-stream;q=0.9", "application/octet-stream"),
        ("text/html, application/x-npy", "application/x-npy"),
        ("application/octet-stream;q=nonsense", "application/octet-stream"),
    ],
)
def test_accept_is_weighed(server: Server, accept: str, kind: str) -> None:
    response = httpx.post(f"{server.url}/embed", json={"inputs": "a"}, headers={"accept": accept})
    assert response.headers["content-type"] == kind


def test_one_connection_serves_many_requests(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    for body in ('{"inputs": "a"}', "{", '{"inputs": "b"}'):
        connection.request("POST", "/embed", body)
        response = connection.getresponse()
        assert response.status == (400 if body == "{" else 200)
        response.read()
    connection.close()


# ---- what is served besides tasks ------------------------------------------------------------------------------------


def test_info_names_models_tasks_and_limits(server: Server) -> None:
    info = httpx.get(f"{server.url}/info").json()
    assert info["defaults"] == {
        "fill-mask": "bert@1",
        "score": "bert@1",
        "embed": "bert@1",
        "embed-all": "bert@1",
        "similarity": "bert@1",
        "nsp": "bert@1",
        "qa": "bert-qa@1",
    }
    assert [model["name"] for model in info["models"]] == ["bert", "bert-qa", "distilbert"]
    assert info["max_input_length"] == 160
    assert info["max_client_batch_size"] == 2048


def test_documentation_is_served_by_us_alone(server: Server) -> None:
    page = httpx.get(f"{server.url}/docs").text
    links = re.findall(r"(?:src|href)=\"([^\"]+)\"", page)
    assert links
    for link in links:
        assert not urlsplit(link).netloc, f"{link} is elsewhere"
        assert httpx.get(urljoin(f"{server.url}/docs", link)).status_code == 200, link
    assert "https://" not in page


def test_openapi_describes_every_body(server: Server) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    for route, name in {
        "/fill-mask": "FillMaskBody",
        "/embed": "EmbedBody",
        "/nsp": "NspBody",
        "/qa": "QaBody",
        "/v1/embeddings": "OpenAiEmbeddingsBody",
    }.items():
        schema = document["paths"][route]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= document["components"]["schemas"].keys()


def test_logs_hold_no_text_of_a_client(server: Server) -> None:
    call(server, "/embed", inputs="confidential xyzzy")
    call(server, "/fill-mask", inputs="confidential xyzzy")
    httpx.post(
        f"{server.url}/embed",
        content=b"{confidential xyzzy",
        headers={"authorization": "Bearer xyzzy"},
    )
    assert not [line for line in server.log if "xyzzy" in line or "confidential" in line]


# ---- huggingface_hub, as released ------------------------------------------------------------------------------------


@pytest.fixture(params=["by-route", "by-base"])
def client(request: pytest.FixtureRequest, server: Server) -> Callable[[str], InferenceClient]:
    """Return a function of a route: a client of the route, or of the server's address alone."""
    if request.param == "by-route":
        return lambda route: InferenceClient(model=server.url + route, token="hf_test", timeout=30)
    return lambda _: InferenceClient(base_url=server.url, token="hf_test", timeout=30)


Client = Callable[[str], InferenceClient]


def test_huggingface_client_fills_masks(client: Client) -> None:
    predictions = client("/fill-mask").fill_mask("Paris is the [MASK] of France.", top_k=3)
    assert [prediction.score for prediction in predictions] == sorted(
        (p.score for p in predictions), reverse=True
    )
    assert len(predictions) == 3
    chosen = client("/fill-mask").fill_mask("the [MASK]", targets=["king", "moon"])
    assert {prediction.token_str for prediction in chosen} == {"king", "moon"}


def test_huggingface_client_embeds(client: Client) -> None:
    vector = client("/embed").feature_extraction("the king", normalize=True, truncate=True)
    assert vector.shape == (1, 64)
    assert float((vector**2).sum()) == pytest.approx(1.0, abs=1e-5)


def test_huggingface_client_compares_sentences(client: Client) -> None:
    texts = ["the king", "the king", "a moon over the sea"]
    found = client("/similarity").sentence_similarity(texts[0], other_sentences=texts[1:])
    vectors = [client("/embed").feature_extraction(text, normalize=True)[0] for text in texts]
    assert found == pytest.approx([float(vectors[0] @ vector) for vector in vectors[1:]], abs=1e-5)
    assert found[0] == pytest.approx(1.0, abs=1e-5)
    assert found[1] < 0.999


def test_huggingface_client_answers_questions(client: Client) -> None:
    context = "Paris is the capital of France."
    answer = client("/qa").question_answering(question="What is Paris?", context=context)
    assert context[answer.start : answer.end] == answer.answer
    answers = client("/qa").question_answering(
        question="What is Paris?", context=context, top_k=2, max_seq_len=64, doc_stride=8
    )
    assert isinstance(answers, list)
    assert len(answers) == 2


def test_huggingface_client_shows_our_errors(client: Client) -> None:
    with pytest.raises((HfHubHTTPError, ValidationError), match=r"inputs\.sentences is"):
        client("/similarity").sentence_similarity("a", other_sentences=[])


@pytest.mark.parametrize(
    ("inputs", "parameters", "route"),
    [
        ({"text": "He opened the door.", "next": "He went in."}, None, "/nsp"),
        ({"text": "He opened the door.", "candidates": ["He went in."]}, None, "/nsp"),
        ([{"text": "the king", "next": "he"}] * 2, None, "/nsp"),
        (["the king", "a moon"], None, "/embed"),
        (["the [MASK]", "a [MASK]"], {"top_k": 2}, "/fill-mask"),
        ({"question": "who?", "context": "the king"}, {"top_k": 2}, "/qa"),
        ([{"question": "who?", "context": "the king"}] * 2, {"top_k": 2}, "/qa"),
        ({"source_sentence": "a", "sentences": ["b"]}, {"truncate": False}, "/similarity"),
    ],
)
def test_the_address_alone_answers_as_the_route_of_the_task(
    server: Server, inputs: Any, parameters: JSON | None, route: str
) -> None:
    body = {"inputs": inputs} | ({"parameters": parameters} if parameters else {})
    ours, theirs = call(server, "/", **body), call(server, route, **body)
    assert ours.status_code == theirs.status_code == 200
    assert ours.json() == theirs.json()
    assert "x-compute-tokens" in ours.headers


def test_what_the_address_alone_cannot_tell_is_refused(server: Server) -> None:
    unclear = call(server, "/", inputs="the king", parameters={})
    assert error_of(unclear) == (422, "invalid_value")
    fits_none = call(server, "/", inputs={"text": "the king"})
    assert error_of(fits_none) == (422, "invalid_value")
    wrong = call(server, "/", inputs="the king [MASK]", normalise=True)
    assert error_of(wrong) == (422, "invalid_body")


def test_unknown_fields_of_shared_routes_are_named(server: Server) -> None:
    """As in text-embeddings-inference they are ignored, but never silently."""
    plain = call(server, "/embed", inputs="the king")
    assert "x-warning" not in plain.headers
    extra = call(server, "/embed", inputs="the king", normalise=False, colour=["r\u00e9d"] * 9)
    assert extra.headers["x-warning"] == "ignored unknown fields: normalise, colour"
    assert extra.json() == plain.json()
    pair = {"source_sentence": "a", "sentences": ["b"]}
    similar = call(server, "/similarity", inputs=pair, parameters={"\u00fc": 1})
    assert similar.headers["x-warning"] == "ignored unknown fields: parameters.\\xfc"
    many = call(server, "/tokenize", inputs="a", **{f"f{i}": i for i in range(20)})
    assert many.headers["x-warning"].endswith("f7 and 12 more")


def test_ranks_say_by_what(server: Server) -> None:
    """Without a classifier, the embeddings' similarity ranks; tests/http/test_tei.py has the other."""
    texts = ["a moon over the sea", "the king", "the old king"]
    ranks = call(server, "/rerank", query="the king", texts=texts, return_text=True)
    assert ranks.headers["x-ranked-by"] == "similarity"
    assert ranks.json()[0] == {"index": 1, "score": pytest.approx(1.0, abs=1e-5), "text": texts[1]}
    scores = [rank["score"] for rank in ranks.json()]
    assert scores == sorted(scores, reverse=True)
    inputs = {"source_sentence": "the king", "sentences": texts}
    assert sorted(call(server, "/similarity", inputs=inputs).json(), reverse=True) == scores


def test_token_embeddings_pool_to_the_embedding(server: Server) -> None:
    tokens = call(server, "/embed_all", inputs=["the king", "a"]).json()
    assert [len(rows) for rows in tokens] == [4, 3]
    pooled = call(server, "/embed", inputs=["the king", "a"], normalize=False).json()
    for rows, vector in zip(tokens, pooled, strict=True):
        assert np.mean(rows, axis=0) == pytest.approx(np.array(vector), abs=1e-5)
