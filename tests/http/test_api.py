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

from tests.support.serving import Server

JSON = dict[str, Any]
PAIR = {"question": "who?", "context": "the king"}


def call(server: Server, route: str, content: bytes | None = None, **body: Any) -> httpx.Response:
    data = content if content is not None else json.dumps(body).encode()
    return httpx.post(
        server.url + route, content=data, headers={"content-type": "application/json"}, timeout=30
    )


BAD: list[tuple[str, JSON | bytes, int, str, str]] = [
    # bodies that cannot be read
    ("/embed", b"", 400, "Validation", r"the body is empty"),
    ("/embed", b"  \n", 400, "Validation", r"the body is empty"),
    ("/embed", b"{", 400, "Validation", r"the body is not JSON: unexpected end of data at byte 1"),
    ("/embed", b"{'inputs': 'x'}", 400, "Validation", r"the body is not JSON"),
    ("/embed", b'\xff\xfe{"inputs": "x"}', 400, "Validation", r"the body is not UTF-8: it begins as UTF-16 or UTF-32"),
    ("/embed", b'{"inputs": "\\ud800"}', 400, "Validation", r"the body is not JSON: .*surrogate"),
    ("/fill-mask", b'{"inputs": "[MASK] \\udfff"}', 400, "Validation", r"surrogate"),
    ("/qa", b'{"inputs": {"question": "\\ud83d", "context": "x"}}', 400, "Validation", r"surrogate"),
    ("/embed", b"[" * 20_000, 400, "Validation", r"the body is not JSON: depth limit"),
    ("/embed", b"[]", 422, "Validation", r"the body: "),
    ("/embed", b'"text"', 422, "Validation", r"the body: "),
    ("/embed", b"null", 422, "Validation", r"the body: "),
    # wrong types, missing and unknown fields
    ("/embed", {}, 422, "Validation", r"^inputs: Field required$"),
    ("/embed", {"inputs": None}, 422, "Validation", r"^inputs: "),
    ("/embed", {"inputs": 5}, 422, "Validation", r"^inputs: Input should be a valid string; inputs: Input should be a valid array"),
    ("/embed", {"inputs": {"text": "x"}}, 422, "Validation", r"^inputs: "),
    ("/embed", {"inputs": ["a", None]}, 422, "Validation", r"inputs\.1: "),
    ("/qa", {"inputs": PAIR, "normalise": True}, 422, "Validation", r"^normalise: there is no such field$"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"], "c": 1}}, 422, "Validation", r"^inputs\.c: there is no such field$"),
    ("/embed", {"inputs": "x", "normalize": "yes"}, 422, "Validation", r"^normalize: Input should be a valid boolean$"),
    ("/embed", {"inputs": "x", "truncation_direction": "up"}, 422, "Validation", r"truncation_direction: .*'left' or 'right'"),
    ("/fill-mask", {"inputs": ["[MASK]"], "parameters": {"top_k": "5"}}, 422, "Validation", r"^parameters\.top_k: Input should be a valid integer$"),
    ("/fill-mask", {"inputs": "[MASK]", "parameters": {"topk": 5}}, 422, "Validation", r"^parameters\.topk: there is no such field"),
    ("/nsp", {"inputs": {"text": "a"}}, 422, "Validation", r"inputs\.next: Field required"),
    ("/nsp", {"inputs": "a"}, 422, "Validation", r"^inputs: "),
    ("/qa", {"inputs": {"question": "a"}}, 422, "Validation", r"inputs\.context: Field required"),
    ("/similarity", {"inputs": {"source_sentence": "a"}}, 422, "Validation", r"inputs\.sentences: Field required"),
    ("/similarity", {"inputs": {"source_sentence": "", "sentences": ["a"]}}, 400, "Empty", r"inputs\.source_sentence is empty"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", ""]}}, 400, "Empty", r"inputs\.sentences\[1\] is empty"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"] * 2048}}, 422, "Validation", r"inputs\.sentences has 2048 texts; the limit is 2047"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty", r"inputs\.sentences is an empty list"),
    ("/embed_all", {"inputs": "x", "truncate": "no"}, 422, "Validation", r"^truncate: Input should be a valid boolean$"),
    ("/embed_all", {"inputs": ["x", ""]}, 400, "Empty", r"inputs\[1\] is empty"),
    ("/embed_all", {"inputs": ["a " * 200] * 300}, 422, "Validation", r"asks for 48000 vectors; the limit is 32768"),
    # text-embeddings-inference's routes; tests/http/test_tei.py compares several hundred requests
    ("/rerank", {"query": "a"}, 422, "Validation", r"^texts: Field required$"),
    ("/rerank", {"query": "", "texts": ["a"]}, 400, "Empty", r"^query is empty"),
    ("/rerank", {"query": "a", "texts": ["b", ""]}, 400, "Empty", r"^texts\[1\] is empty"),
    ("/rerank", {"query": "a", "texts": ["b", "c " * 200], "truncate": False}, 422, "Validation", r"^texts\[1\] has 202 tokens; the model reads 160"),
    ("/rerank", {"query": "a", "texts": ["b"], "model": "bert-qa"}, 424, "Backend", r"model bert-qa cannot do rerank; it does qa"),
    ("/predict", {"inputs": "a"}, 424, "Backend", r"no served model can do text-classification"),
    ("/tokenize", {"inputs": ["a"] * 2049}, 422, "Validation", r"inputs has 2049 texts; the limit is 2048"),
    ("/tokenize", {"inputs": "a", "model": "nobody"}, 404, "Validation", r"no model 'nobody' is served"),
    ("/tokenize", {"inputs": "a", "prompt_name": "query"}, 422, "Validation", r"prompt_name 'query'"),
    ("/decode", {"ids": [5, -1]}, 422, "Validation", r"ids has token ids from -1 to 5; they are 0 to 4294967295"),
    ("/decode", {"ids": [[5], []]}, 400, "Empty", r"ids has an empty list"),
    # empty
    ("/embed", {"inputs": []}, 400, "Empty", r"inputs is an empty list"),
    ("/fill-mask", {"inputs": []}, 400, "Empty", r"inputs is an empty list"),
    ("/nsp", {"inputs": []}, 400, "Empty", r"empty list"),
    ("/nsp", {"inputs": {"text": "a", "candidates": []}}, 400, "Empty", r"empty list"),
    ("/qa", {"inputs": []}, 400, "Empty", r"empty list"),
    ("/embed", {"inputs": ""}, 400, "Empty", r"^inputs is empty; it needs at least 1 character$"),
    ("/embed", {"inputs": ["a", ""]}, 400, "Empty", r"^inputs\[1\] is empty"),
    ("/embed", {"inputs": [[5, 6], []]}, 400, "Empty", r"^inputs\[1\] is empty; it needs at least 1 token id$"),
    ("/fill-mask", {"inputs": ""}, 400, "Empty", r"^inputs is empty"),
    ("/nsp", {"inputs": {"text": "", "next": "a"}}, 400, "Empty", r"^inputs\.text is empty"),
    ("/nsp", {"inputs": [{"text": "a", "next": ""}]}, 400, "Empty", r"^inputs\[0\]\.next is empty"),
    ("/qa", {"inputs": {"question": "", "context": "a"}}, 400, "Empty", r"^inputs\.question is empty"),
    ("/qa", {"inputs": {"question": "a", "context": " \n "}}, 422, "Validation", r"^inputs\.context has no token"),
    # masks
    ("/fill-mask", {"inputs": "no mask"}, 422, "Validation", r"holds no mask token; put \[MASK\]"),
    ("/fill-mask", {"inputs": ["[MASK]", "none"]}, 422, "Validation", r"^inputs\[1\] holds no mask token"),
    ("/fill-mask", {"inputs": "[MASK]" * 600}, 422, "Validation", r"holds 600 mask tokens; the limit is 64"),
    ("/fill-mask", {"inputs": "a " * 200 + "[MASK]"}, 422, "Validation", r"mask token at token 201, but the model reads only tokens 1 to 158"),
    ("/fill-mask", {"inputs": "[MASK]", "parameters": {"top_k": 0}}, 422, "Validation", r"top_k must be between 1 and \d+, got 0"),
    ("/fill-mask", {"inputs": "[MASK]", "parameters": {"top_k": 100_000}}, 422, "Validation", r"top_k must be between 1 and \d+, got 100000"),
    ("/fill-mask", {"inputs": "[MASK]", "parameters": {"targets": ["", " "]}}, 422, "Validation", r"none of the targets"),
    # limits
    ("/embed", {"inputs": "a" * 10_000_000}, 413, "Validation", r"the body has 10\d{6} bytes; the limit is 8388608"),
    ("/embed", {"inputs": ["a"] * 2049}, 422, "Validation", r"inputs has 2049 texts; the limit is 2048"),
    ("/embed", {"inputs": "a " * 400, "truncate": False}, 422, "Validation", r"has 402 tokens; the model reads 160, and truncate is false"),
    ("/embed", {"inputs": "a", "dimensions": 65}, 422, "Validation", r"dimensions must be between 1 and 64, got 65"),
    ("/embed", {"inputs": "a", "dimensions": 0}, 422, "Validation", r"dimensions must be between 1 and 64, got 0"),
    ("/embed", {"inputs": "a", "prompt_name": "query"}, 422, "Validation", r"prompt_name 'query' is not one of the model's prompts"),
    ("/embed", {"inputs": [5, 10**6]}, 422, "Validation", r"token ids from 5 to 1000000; this model's are 0 to \d+"),
    ("/embed", {"inputs": [-1]}, 422, "Validation", r"token ids from -1 to -1"),
    ("/embed", {"inputs": [10**30]}, 422, "Validation", r"inputs"),
    ("/qa", {"inputs": PAIR, "parameters": {"top_k": 0}}, 422, "Validation", r"top_k must be between 1 and 1000, got 0"),
    ("/qa", {"inputs": PAIR, "parameters": {"max_seq_len": 161}}, 422, "Validation", r"max_seq_len must be between 8 and 160, got 161"),
    ("/qa", {"inputs": PAIR, "parameters": {"max_seq_len": 20, "doc_stride": 20}}, 422, "Validation", r"doc_stride must be between 0 and \d+, got 20"),
    ("/qa", {"inputs": PAIR | {"question": "a " * 50}, "parameters": {"max_seq_len": 20}}, 422, "Validation", r"leaves no room for a text beside"),
    ("/qa", {"inputs": PAIR, "parameters": {"max_answer_len": 0}}, 422, "Validation", r"max_answer_len must be between 1 and 160, got 0"),
    ("/qa", {"inputs": [PAIR] * 1001, "parameters": {"top_k": 100}}, 422, "Validation", r"asks for 100100 answers; the limit is 32768"),
    ("/qa", {"inputs": PAIR | {"context": "a " * 499_000}, "parameters": {"max_seq_len": 8, "doc_stride": 1}}, 422, "Validation", r"windows hold \d+ tokens; the limit of a request is 1048576"),
    ("/fill-mask", {"inputs": ["[MASK]" * 60] * 20, "parameters": {"top_k": 90}}, 422, "Validation", r"predictions \(masks x top_k\); the limit is 32768"),
    ("/embed", {"inputs": ["a", "a" * 1_000_001]}, 422, "Validation", r"inputs\[1\] has 1000001 characters; the limit is 1000000"),
    ("/embed", {"inputs": [{}] * 30_000}, 422, "Validation", r"^inputs"),
    ("/nsp", {"inputs": [{}] * 30_000}, 422, "Validation", r"^inputs"),
    ("/embed", {"inputs": [{}] * 40_000}, 413, "Validation", r"the body has over 32768 texts, lists and objects"),
    ("/embed", b"[" * 100_000, 413, "Validation", r"the body has over 32768 texts, lists and objects"),
    ("/embed", {"inputs": [1] * 1_100_000}, 413, "Validation", r"the body has over 1081344 values"),
    ("/embed", {"inputs": [1] * 1_000_000 + [True]}, 422, "Validation", r"list of integers; element 1000000 is another value"),
    ("/qa", {"inputs": PAIR} | {f"unknown{n}": 1 for n in range(9)}, 422, "Validation", r"^unknown0: there is no such field$"),
    ("/qa", {"inputs": PAIR, "x" * 1000: 1}, 422, "Validation", r"^x{80}: there is no such field"),
    ("/fill-mask", {"inputs": "[MASK]", "parameters": {"targets": ["zzz"] * 1001}}, 422, "Validation", r"targets has 1001 tokens; the limit is 1000"),
    # models
    ("/embed", {"inputs": "a", "model": "nobody"}, 404, "Validation", r"no model 'nobody' is served"),
    ("/embed", {"inputs": "a", "model": "bert@7"}, 404, "Validation", r"no model 'bert@7' is served"),
    ("/embed", {"inputs": "a", "model": "bert-qa"}, 424, "Backend", r"model bert-qa cannot do embed; it does qa"),
    ("/nsp", {"inputs": {"text": "a", "next": "b"}, "model": "distilbert"}, 424, "Backend", r"model distilbert cannot do nsp"),
    # routes
    ("/translate", {"inputs": "a"}, 404, "Validation", r"there is no route '/translate'"),
    ("/healthz", {}, 405, "Validation", r"/healthz does not answer POST"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("route", "body", "status", "kind", "message"),
    BAD,
    ids=[f"{i}-{b[0]}-{b[2]}" for i, b in enumerate(BAD)],
)
def test_bad_input_is_told_what_is_wrong(
    server: Server, route: str, body: JSON | bytes, status: int, kind: str, message: str
) -> None:
    response = call(
        server,
        route,
        content=body if isinstance(body, bytes) else None,
        **(body if isinstance(body, dict) else {}),
    )
    assert response.status_code == status, response.text[:300]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    answer = response.json()
    assert answer.keys() == {"error", "error_type"}
    assert answer["error_type"] == kind
    assert re.search(message, answer["error"]), answer["error"][:300]
    assert len(answer["error"]) < 500, "an error does not repeat what was sent"


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
    ("content", "encoding", "status", "message"),
    [
        (b"{}", "br", 415, "the body's Content-Encoding is 'br'; send gzip, or none"),
        (b"{}", "gzip, gzip", 415, "is 'gzip, gzip'"),
        (b"{}", "gzip", 400, "the body is not gzip: Error -3"),
        (
            gzip.compress(b"{}", mtime=0)[:-3],
            "gzip",
            400,
            "the body is not gzip: it ends too early",
        ),
        (b"", "gzip", 400, "the body is empty"),
        (gzip.compress(b" " * 2**28), "gzip", 413, "the decompressed body has over 8388608 bytes"),
    ],
)
def test_bad_compression_is_told(
    server: Server, content: bytes, encoding: str, status: int, message: str
) -> None:
    response = compressed(server, content, encoding)
    assert response.status_code == status
    assert message in response.json()["error"]
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
    assert response.status_code == 413
    assert "limit is 8388608" in response.json()["error"]


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
    with pytest.raises(
        (HfHubHTTPError, ValidationError), match=r"inputs\.sentences is an empty list"
    ):
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
    assert unclear.status_code == 422
    assert unclear.json()["error"] == (
        "inputs without a mask and with parameters may be for /classify or /token-classification, "
        "and neither of them is served; send the request to the route of its task"
    )
    fits_none = call(server, "/", inputs={"text": "the king"})
    assert fits_none.status_code == 422
    assert (
        "inputs has an object that fits no task: it has none of source_sentence"
        in fits_none.json()["error"]
    )
    wrong = call(server, "/", inputs="the king [MASK]", normalise=True)
    assert (wrong.status_code, wrong.json()["error"]) == (
        422,
        "normalise: there is no such field",
    )


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
