"""Poolings that leave out the prompt (`include_prompt` false), against sentence-transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.store import Bundle
from cloze.service.core import Device
from cloze.service.engine.onnx_engine import OnnxEngine
from cloze.service.tasks import TaskContext
from cloze.service.tasks.embed import TASK, EmbedParameters
from cloze.service.text.tokenizer import Tokenizer
from tests.support.sentence_folders import LIMITS, saved
from tests.support.serving import Server, running_server

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PROMPTS = {"query": "search for the king : ", "document": "text : ", "long": "the king " * 30}
TEXTS = ["the king", "Paris is the capital of France!", "who? " * 30, "moon"]
HEADER = "x-embedding-space"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pooling = Pooling(64, pooling_mode=MODES, include_prompt=False)
    return saved(tmp_path_factory.mktemp("st"), "bert-plain", pooling, prompts=PROMPTS)


@pytest.fixture(scope="module")
def bundle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    options = ExportOptions(tasks=("embed", "embed-all", "embed-layers"))
    return export(str(folder), "asked", Store(tmp_path_factory.mktemp("store")), options)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str | None, NDArray[np.float32]]:
    oracle = SentenceTransformer(str(folder), device="cpu")
    return {name: oracle.encode(TEXTS, prompt_name=name, batch_size=1) for name in (None, *PROMPTS)}


@pytest.fixture(scope="module")
def server(bundle: Bundle) -> Iterator[Server]:
    with running_server(bundle.path.parents[1], "--frontends", "1") as server:
        yield server


def post(server: Server, route: str, **body: Any) -> httpx.Response:
    response = httpx.post(server.url + route, json=body)
    assert response.status_code == 200, response.text
    return response


def test_every_pooling_is_that_of_sentence_transformers(
    server: Server, theirs: dict[str | None, NDArray[np.float32]]
) -> None:
    answers = {
        name: post(server, "/embed", inputs=TEXTS, prompt_name=name, normalize=False)
        for name in theirs
    }
    for name, expected in theirs.items():
        np.testing.assert_allclose(answers[name].json(), expected, atol=2e-5)
    assert np.abs(theirs["query"] - theirs[None]).max() > 0.1
    [*roles] = [
        post(server, "/v1/embeddings", input=TEXTS, model="asked", input_type=role).json()["data"]
        for role in ("search_query", "passage")
    ]
    for rows, name in zip(roles, ("query", "document"), strict=True):
        np.testing.assert_allclose([row["embedding"] for row in rows], theirs[name], atol=2e-5)
    spaces = [answers[name].headers[HEADER] for name in (None, "query", "document")]
    assert len(set(spaces)) == 3
    cosines = post(server, "/rerank", query=TEXTS[0], texts=TEXTS[1:]).json()
    unit = {
        name: rows / np.linalg.norm(rows, axis=1, keepdims=True) for name, rows in theirs.items()
    }
    expected = unit["document"][1:] @ unit["query"][0]
    ours = {row["index"]: row["score"] for row in cosines}
    assert [ours[index] for index in range(3)] == pytest.approx(expected.tolist(), abs=1e-5)


def test_prompts_of_one_batch_are_left_out_one_by_one(bundle: Bundle) -> None:
    tokenizer = Tokenizer(bundle)
    context = TaskContext(bundle.manifest, tokenizer, LIMITS)
    names = ("query", "document", None)
    encodings = []
    for name in names:
        [prompt] = tokenizer.ids([PROMPTS.get(name or "", "")])
        own = list(range(7, 25 - len(prompt)))  # so that all encodings have one length
        encodings += TASK.prepare(own, EmbedParameters(prompt_name=name), context).encodings
    assert len({len(encoding) for encoding in encodings}) == 1
    assert len({getattr(e.requests["embedding"], "first", 0) for e in encodings}) == 3
    engine = OnnxEngine(bundle, Device.CPU)
    for encoding, output in zip(encodings, engine.run(encodings), strict=True):
        [alone] = engine.run([encoding])
        np.testing.assert_allclose(
            output["embedding"].array, alone["embedding"].array, atol=1e-5, rtol=0
        )


def test_the_prompt_of_each_window_is_left_out(bundle: Bundle) -> None:
    tokenizer = Tokenizer(bundle)
    context = TaskContext(bundle.manifest, tokenizer, LIMITS)
    [prompt] = tokenizer.ids([PROMPTS["query"]])
    for options in ({"truncation_direction": "left"}, {"long_text": "window"}):
        asked = EmbedParameters(prompt_name="query", **options)
        encodings = TASK.prepare("who walked " * 30, asked, context).encodings
        firsts = {encoding.requests["embedding"].first for encoding in encodings}  # type: ignore[attr-defined]
        assert firsts == {1 + len(prompt)}
    assert len(encodings) > 1


def test_requests_that_pool_prompts_are_refused(server: Server) -> None:
    refused = httpx.post(
        server.url + "/embed", json={"inputs": "who", "prompt_name": "query", "pooling": "max"}
    )
    assert refused.status_code == 424
    assert "pool a prompt too, which the pooling of asked@1 leaves out" in refused.text
    whole = post(server, "/embed", inputs="the king", pooling="max", normalize=False).json()
    own = post(server, "/embed", inputs="the king", normalize=False).json()
    np.testing.assert_allclose(whole[0], own[0][64:128], atol=1e-6)
