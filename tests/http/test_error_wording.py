"""The wording of errors: `error-wording.txt` has one line per provoked error.

Other tests compare statuses and codes, so a better sentence changes this file only. To accept new
sentences, run this test with ``REWRITE_WORDING=1`` and read the difference.
"""

import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from cloze.service.http.routes import NPY, RAW
from tests.support.serving import Server

WORDING = Path(__file__).with_name("error-wording.txt")

JSON = dict[str, Any]
Provocation = tuple[str, JSON | bytes] | tuple[str, JSON | bytes, dict[str, str]]
"""The path of a POST request, its body, and its headers."""

PAIR = {"question": "who?", "context": "the king"}
LONG, SHORT = "the king was red " * 50, "the king"
SPANS = "the king of Paris was red . a moon over the sea ,  and the old house"
FAR = "[MASK] " + "red " * 200 + "[MASK]"


def tensor(name: str, *texts: str, **changes: Any) -> JSON:
    """Return a tensor of texts in the form of the Open Inference Protocol."""
    return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": texts} | changes


def infer(model: str, *tensors: JSON, **fields: Any) -> Provocation:
    """Return a request of the Open Inference Protocol."""
    return f"/v2/models/{model}/infer", {"inputs": tensors, **fields}


def packed(data: bytes, length: str = "") -> Provocation:
    """Return such a request with a binary tensor; by default its JSON has the stated length."""
    sent = tensor("text", "", data=None, parameters={"binary_data_size": len(data)})
    head = orjson.dumps({"inputs": [sent]})
    headers = {"inference-header-content-length": length or str(len(head))}
    return "/v2/models/bert.embed/infer", head + data, headers


# Models: bert, bert-qa, distilbert.
SMALL: list[Provocation] = [
    # bodies that cannot be read
    ("/embed", b""),
    ("/embed", b"  \n"),
    ("/embed", b"{"),
    ("/embed", b"{'inputs': 'x'}"),
    ("/embed", b'\xff\xfe{"inputs": "x"}'),
    ("/embed", b'{"inputs": "\\ud800"}'),
    ("/fill-mask", b'{"inputs": "[MASK] \\udfff"}'),
    ("/qa", b'{"inputs": {"question": "\\ud83d", "context": "x"}}'),
    ("/embed", b"[" * 20_000),
    ("/embed", b"[]"),
    ("/embed", b'"text"'),
    ("/embed", b"null"),
    # wrong types, missing and unknown fields
    ("/embed", {}),
    ("/embed", {"inputs": None}),
    ("/embed", {"inputs": 5}),
    ("/embed", {"inputs": {"text": "x"}}),
    ("/embed", {"inputs": ["a", None]}),
    ("/qa", {"inputs": PAIR, "normalise": True}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"], "c": 1}}),
    ("/embed", {"inputs": "x", "normalize": "yes"}),
    ("/embed", {"inputs": "x", "truncation_direction": "up"}),
    ("/fill-mask", {"inputs": ["[MASK]"], "parameters": {"top_k": "5"}}),
    ("/fill-mask", {"inputs": "[MASK]", "parameters": {"topk": 5}}),
    ("/nsp", {"inputs": {"text": "a"}}),
    ("/nsp", {"inputs": "a"}),
    ("/qa", {"inputs": {"question": "a"}}),
    ("/similarity", {"inputs": {"source_sentence": "a"}}),
    ("/similarity", {"inputs": {"source_sentence": "", "sentences": ["a"]}}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", ""]}}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"] * 2048}}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}),
    ("/embed_all", {"inputs": "x", "truncate": "no"}),
    ("/embed_all", {"inputs": ["x", ""]}),
    ("/embed_all", {"inputs": ["a " * 200] * 300}),
    # text-embeddings-inference's routes; tests/http/test_tei.py compares several hundred requests
    ("/rerank", {"query": "a"}),
    ("/rerank", {"query": "", "texts": ["a"]}),
    ("/rerank", {"query": "a", "texts": ["b", ""]}),
    ("/rerank", {"query": "a", "texts": ["b", "c " * 200], "truncate": False}),
    ("/rerank", {"query": "a", "texts": ["b"], "model": "bert-qa"}),
    ("/predict", {"inputs": "a"}),
    ("/tokenize", {"inputs": ["a"] * 2049}),
    ("/tokenize", {"inputs": "a", "model": "nobody"}),
    ("/tokenize", {"inputs": "a", "prompt_name": "query"}),
    ("/decode", {"ids": [5, -1]}),
    ("/decode", {"ids": [[5], []]}),
    # empty
    ("/embed", {"inputs": []}),
    ("/fill-mask", {"inputs": []}),
    ("/nsp", {"inputs": []}),
    ("/nsp", {"inputs": {"text": "a", "candidates": []}}),
    ("/qa", {"inputs": []}),
    ("/embed", {"inputs": ""}),
    ("/embed", {"inputs": ["a", ""]}),
    ("/embed", {"inputs": [[5, 6], []]}),
    ("/fill-mask", {"inputs": ""}),
    ("/nsp", {"inputs": {"text": "", "next": "a"}}),
    ("/nsp", {"inputs": [{"text": "a", "next": ""}]}),
    ("/qa", {"inputs": {"question": "", "context": "a"}}),
    ("/qa", {"inputs": {"question": "a", "context": " \n "}}),
    # masks
    ("/fill-mask", {"inputs": "no mask"}),
    ("/fill-mask", {"inputs": ["[MASK]", "none"]}),
    ("/fill-mask", {"inputs": "[MASK]" * 600}),
    ("/fill-mask", {"inputs": "a " * 200 + "[MASK]"}),
    ("/fill-mask", {"inputs": "[MASK]", "parameters": {"top_k": 0}}),
    ("/fill-mask", {"inputs": "[MASK]", "parameters": {"top_k": 100_000}}),
    ("/fill-mask", {"inputs": "[MASK]", "parameters": {"targets": ["", " "]}}),
    # limits
    ("/embed", {"inputs": "a" * 10_000_000}),
    ("/embed", {"inputs": ["a"] * 2049}),
    ("/embed", {"inputs": "a " * 400, "truncate": False}),
    ("/embed", {"inputs": "a", "dimensions": 65}),
    ("/embed", {"inputs": "a", "dimensions": 0}),
    ("/embed", {"inputs": "a", "prompt_name": "query"}),
    ("/embed", {"inputs": [5, 10**6]}),
    ("/embed", {"inputs": [-1]}),
    ("/embed", {"inputs": [10**30]}),
    ("/qa", {"inputs": PAIR, "parameters": {"top_k": 0}}),
    ("/qa", {"inputs": PAIR, "parameters": {"max_seq_len": 161}}),
    ("/qa", {"inputs": PAIR, "parameters": {"max_seq_len": 20, "doc_stride": 20}}),
    ("/qa", {"inputs": PAIR | {"question": "a " * 50}, "parameters": {"max_seq_len": 20}}),
    ("/qa", {"inputs": PAIR, "parameters": {"max_answer_len": 0}}),
    ("/qa", {"inputs": [PAIR] * 1001, "parameters": {"top_k": 100}}),
    ("/qa", {"inputs": PAIR | {"context": "a " * 499_000}, "parameters": {"max_seq_len": 8, "doc_stride": 1}}),
    ("/fill-mask", {"inputs": ["[MASK]" * 60] * 20, "parameters": {"top_k": 90}}),
    ("/embed", {"inputs": ["a", "a" * 1_000_001]}),
    ("/embed", {"inputs": [{}] * 30_000}),
    ("/nsp", {"inputs": [{}] * 30_000}),
    ("/embed", {"inputs": [{}] * 40_000}),
    ("/embed", b"[" * 100_000),
    ("/embed", {"inputs": [1] * 1_100_000}),
    ("/embed", {"inputs": [1] * 1_000_000 + [True]}),
    ("/qa", {"inputs": PAIR} | {f"unknown{n}": 1 for n in range(9)}),
    ("/qa", {"inputs": PAIR, "x" * 1000: 1}),
    ("/fill-mask", {"inputs": "[MASK]", "parameters": {"targets": ["zzz"] * 1001}}),
    # models
    ("/embed", {"inputs": "a", "model": "nobody"}),
    ("/embed", {"inputs": "a", "model": "bert@7"}),
    ("/embed", {"inputs": "a", "model": "bert-qa"}),
    ("/nsp", {"inputs": {"text": "a", "next": "b"}, "model": "distilbert"}),
    # routes
    ("/translate", {"inputs": "a"}),
    ("/healthz", {}),
    # the address alone
    ("/", {"inputs": "the king", "parameters": {}}),
    ("/", {"inputs": {"text": "the king"}}),
    ("/", {"inputs": "the king [MASK]", "normalise": True}),
    # OpenAI's and Cohere's routes
    *(
        ("/v1/embeddings", {"model": "bert"} | body)
        for body in (
            {"input": ""}, {"input": []}, {"input": "a", "model": "gpt"},
            {"input": "a", "model": "bert-qa"}, {"input": "a", "dimensions": 0},
            {"input": "a", "encoding_format": "hex"}, {"input": ["a"] * 3000}, {},
        )
    ),
    ("/v1/chat", {}),
    *(
        ("/v2/embed", {"model": "bert", "input_type": "search_query"} | body)
        for body in ({}, {"texts": []}, {"texts": ["a", ""]}, {"texts": ["a"], "inputs": []},
                     {"texts": ["a"], "model": "gpt"}, {"texts": ["a"], "output_dimension": 65},
                     {"texts": ["a"], "truncate": "MIDDLE"}, {"texts": ["a"], "embedding_types": ["int8"]},
                     {"texts": ["a " * 200], "truncate": "NONE"}, {"texts": ["a"], "input_type": "x"})
    ),
    # the Open Inference Protocol
    infer("nobody.embed", tensor("text", "a")),
    infer("bert.walk", tensor("text", "a")),
    infer("bert", tensor("text", "a")),
    infer("distilbert.nsp", tensor("text", "a")),
    infer("bert.embed"),
    infer("bert.embed", tensor("text")),
    infer("bert.embed", tensor("text", "a", shape=[1, 2])),
    infer("bert.embed", tensor("txt", "a")),
    infer("bert.embed", tensor("text", "a"), tensor("text", "a")),
    infer("bert.embed", tensor("text", "a", "b", shape=[1])),
    infer("bert.embed", tensor("text", "a", datatype="FP32")),
    infer("bert.embed", tensor("text", "a", data=[1])),
    infer("bert.embed", tensor("text", "a", data=None)),
    infer("bert.embed", tensor("text", "a"), outputs=[{"name": "x"}]),
    infer("bert.embed", tensor("text", "a"), parameters={"x": 1}),
    infer("bert.embed", tensor("text", "a", "")),
    infer("bert.embed", tensor("text", "a", parameters={"binary_data_size": 1})),
    infer("bert.nsp", tensor("text", "a")),
    infer("bert.nsp", tensor("text", "a"), tensor("next", "")),
    infer("bert.nsp", tensor("text", "a"), tensor("next", "a", "b")),
    infer("bert.similarity", tensor("source_sentence", "a", "b"), tensor("sentences", "a")),
    packed(b"", "0"),
    packed(b"", "999999"),
    packed(b"", "-1"),
    packed(b"\x05\0\0\0abc"),
    packed(b"\x01\0"),
    packed(b"\x01\0\0\0\xff"),
    packed(b"\x01\0\0\0a\x01\0\0\0b"),
    ("/v2/models/bert.embed/infer", b'{"inputs": []}abc', {"inference-header-content-length": "14"}),
    # fill-mask
    ("/fill-mask", {"inputs": "year " * 157 + "[MASK]", "parameters": {"targets": ["walking"], "targets_as": "words"}}),
    ("/fill-mask", {"inputs": "[MASK] " + "year " * 158, "parameters": {"decode": "beam"}}),
    ("/fill-mask", {"inputs": ["[MASK] " * 9] * 40, "parameters": {"targets": [f"walking{n}" for n in range(100)], "targets_as": "words"}}),
    ("/fill-mask", {"inputs": ["[MASK] [MASK]"] * 40, "parameters": {"decode": "beam", "top_k": 50}}),
    *(
        ("/fill-mask", {"inputs": "the [MASK]", "parameters": parameters})
        for parameters in (
            {"decode": "beam", "targets": ["a"]}, {"targets_as": "words"}, {"original": "red", "targets": ["a"]},
            {"original": ["red", "a"]}, {"original": "Xyzzy"}, {"decode": "sample"},
            {"targets": ["unhealthy " * 100], "targets_as": "words"},
            {"targets": ["\u5317"], "targets_as": "words"},
        )
    ),
    ("/fill-mask", {"inputs": ["the [MASK]"] * 65, "parameters": {"original": ["red"] * 65}}),
    ("/fill-mask", {"inputs": FAR, "parameters": {"long_text": "window"}}),
    *(
        ("/score", {"inputs": inputs})
        for inputs in ("", [], " \t", ["red", "the [MASK]"], "year " * 159, 5)
    ),
    # headers
    *(
        ("/embed", {"inputs": "a"}, headers)
        for headers in (
            {"accept": f"{RAW}; dtype=float64"}, {"accept": f"{NPY};dtype=x"}, {"accept": "text/html," * 101},
            {"x-request-timeout-ms": "soon"}, {"x-request-timeout-ms": "0"}, {"x-request-class": "fast"},
            {"content-encoding": "br"}, {"content-encoding": "gzip"},
        )
    ),
]  # fmt: skip

# Models: bert-classifier, bert-tagger, cloze-bert, cloze-qa.
LARGE: list[Provocation] = [
    *(
        (route, {"inputs": LONG, "long_text": "error"})
        for route in ("/embed", "/embed_all", "/embed_sparse")
    ),
    *(
        (route, {"inputs": inputs, "parameters": {"long_text": "error"}})
        for route, inputs in (
            ("/nsp", {"text": LONG, "next": SHORT}),
            ("/similarity", {"source_sentence": LONG, "sentences": [SHORT]}), ("/classify", LONG),
            ("/token-classification", LONG), ("/qa", PAIR | {"question": "red " * 70}),
        )
    ),
    ("/nsp", {"inputs": {"text": LONG, "next": SHORT}, "parameters": {"long_text": "window"}}),
    ("/classify", {"inputs": {"text": LONG, "text_pair": SHORT}, "parameters": {"long_text": "window"}}),
    ("/predict", {"inputs": LONG, "model": "bert-classifier", "long_text": "error"}),
    ("/rerank", {"query": "red " * 200, "texts": ["a"], "model": "cloze-bert", "long_text": "window"}),
    ("/embed", {"inputs": SHORT, "truncate": True, "long_text": "error"}),
    ("/embed", {"inputs": SHORT, "truncate": False, "long_text": "truncate"}),
    ("/embed", {"inputs": SHORT, "spans": [[0, 3]], "long_text": "window"}),
    ("/embed", {"inputs": SHORT, "spans": [[0, 3]], "pooling": "cls"}),
    ("/embed", {"inputs": SHORT, "prompt_name": "a", "input_type": "query"}),
    ("/embed", {"inputs": SHORT, "input_type": "neither"}),
    *(
        ("/embed", {"inputs": inputs, "spans": spans})
        for spans, inputs in (
            ([[3, 3]], SPANS), ([[0, 3], [0, 69]], SPANS), ([[-1, 3]], SPANS), ([[49, 51]], SPANS),
            ([[995, 999]], "year " * 200), ([[0, 3]], [SPANS, SPANS]), ([[0, 3]], [5, 6]),
            ([[0, 1]] * 2049, SPANS), ([[0, 1, 2]], SPANS), ([], SPANS),
        )
    ),
    ("/embed", {"inputs": "a", "layers": "third"}),
    ("/embed", {"inputs": "a", "pooling": "median"}),
    ("/embed", {"inputs": "a", "layers": "sum-last-four"}),
    ("/embed_all", {"inputs": ["the king", [5, 6]], "return_offsets": True}),
    ("/embed_sparse", {"inputs": "a", "top_k": 0}),
    ("/embed_sparse", {"inputs": "a", "top_k": 10_000}),
    ("/embed_sparse", {"inputs": ["a"] * 400, "top_k": 182}),
    *(
        ("/token-classification", {"inputs": "a", "parameters": parameters})
        for parameters in (
            {"stride": 158}, {"stride": 5, "aggregation_strategy": "none"}, {"aggregation_strategy": "last"},
            {"stride": 3, "long_text": "error"}, {"long_text": "window", "aggregation_strategy": "none"},
        )
    ),
    ("/token-classification", {"inputs": ["a", " \n"]}),
    ("/token-classification", {"inputs": "a " * 400_000, "parameters": {"stride": 150}}),
    *(
        ("/redact", {"inputs": "a", "parameters": parameters})
        for parameters in (
            {"labels": ["PER", "ORG"]}, {"labels": []}, {"min_score": 1.5}, {"patterns": ["SSN"]},
            {"region": "Germany"}, {"label_set": "other"},
        )
    ),
    ("/classify", {"inputs": [{"text": "a", "text_pair": ""}]}),
    ("/classify", {"inputs": "a", "parameters": {"top_k": 0}}),
    ("/classify", {"inputs": "a", "parameters": {"function_to_apply": "tanh"}}),
    ("/classify", {"inputs": "a", "parameters": {"label_set": "x"}}),
    *(
        ("/zero-shot-classification", {"inputs": LONG, "parameters": {"candidate_labels": ["a", "b"]} | parameters})
        for parameters in (
            {"candidate_labels": None}, {"candidate_labels": []}, {"candidate_labels": ["a", ""]},
            {"candidate_labels": ["a", "b", "a"]}, {"candidate_labels": ["a" * 1001]},
            {"candidate_labels": ["red " * 200]}, {"hypothesis_template": "It fits."},
            {"hypothesis_template": "{} or {}"}, {"hypothesis_template": ""}, {"long_text": "error"},
            {"candidate_labels": ["a", " \u200b"]},
            {"candidate_labels": [f"red {n}" for n in range(2048)], "hypothesis_template": "a" * 999 + "{}"},
        )
    ),
]  # fmt: skip


def ask(server: Server, path: str, body: JSON | bytes, headers: dict[str, str]) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | headers
    return httpx.post(server.url + path, content=content, headers=headers, timeout=30)


def _times(repeated: re.Match[str]) -> str:
    """Return a text that was repeated, like ``<red  x9>``."""
    return f"<{repeated[1]} x{len(repeated[0]) // len(repeated[1])}>"


def lines(server: Server, provocations: Iterable[Provocation]) -> Iterator[str]:
    for path, body, *further in provocations:
        headers = further[0] if further else {}
        response = ask(server, path, body, headers)
        shown = json.dumps(body) if isinstance(body, dict) else ascii(body)[2:-1]
        sent = "".join(f" {name}: {value[:40]}" for name, value in headers.items())
        shown = re.sub(r"(.{1,60}?)\1{4,}", _times, shown)
        request = f"{path}{sent} {textwrap.shorten(shown, 120, placeholder='...')}"
        assert response.status_code >= 400, request
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"]
        answer = response.json()
        error = answer.get("error", answer.get("message"))
        message = error if isinstance(error, str) else error["message"]
        assert len(message) < 500, "an error does not repeat what was sent"
        assert message.isascii()
        assert message.isprintable()
        code = response.headers["x-error-code"]
        assert answer.get("code", code) == code
        yield f"{response.status_code} {code} | {request} | {message}"


@pytest.mark.parametrize("frontends", [(), ("--frontends", "2")], ids=["one-process", "front-ends"])
def test_every_error_says_what_is_wrong(
    servers: Callable[[tuple[str, ...]], Server], every_task: Server, frontends: tuple[str, ...]
) -> None:
    found = [*lines(servers(frontends), SMALL), *lines(every_task, LARGE)]
    if os.environ.get("REWRITE_WORDING"):
        WORDING.write_text("\n".join(found) + "\n")
    assert found == WORDING.read_text().splitlines()
