"""What every route has in common, and the released client of Hugging Face."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

from tests.support.serving import Server


def call(server: Server, route: str, content: bytes | None = None, **body: Any) -> httpx.Response:
    data = content if content is not None else json.dumps(body).encode()
    return httpx.post(
        server.url + route, content=data, headers={"content-type": "application/json"}, timeout=30
    )


def test_probes_are_answered_while_a_huge_text_is_tokenized(server: Server) -> None:
    """By order, not by the clock: several probes come back before the text does."""
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=30) as probes:
        huge = pool.submit(call, server, "/embed", inputs=["the king " * 110_000] * 8)
        for _ in range(5):
            assert probes.get("/healthz").status_code == 200
        assert not huge.done()
        assert huge.result().headers["x-truncated"] == "8"


PAIR = {"question": "who?", "context": "the king"}
REQUESTS: dict[str, Any] = {
    "/embed": {"inputs": "the king"},
    "/embed_all": {"inputs": "the king", "return_offsets": True},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}},
    "/fill-mask": {"inputs": "the [MASK]"},
    "/score": {"inputs": "red"},
    "/nsp": {"inputs": {"text": "a", "next": "b"}},
    "/qa": {"inputs": PAIR},
    "/": {"inputs": [PAIR] * 2, "parameters": {"top_k": 2}},
    "/rerank": {"query": "the king", "texts": ["a moon", "the king"], "return_text": True},
    "/tokenize": {"inputs": "the king"},
    "/v1/embeddings": {"input": "the king", "model": "distilbert"},
}
IDENTITY = re.compile(r'"id":"[^"]*",|"created":\d+,')
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@pytest.mark.parametrize("path", REQUESTS)
def test_front_ends_answer_as_one_process(server: Server, front_ends: Server, path: str) -> None:
    """The other tests of this folder ask one process."""
    ours, theirs = (call(each, path, **REQUESTS[path]) for each in (front_ends, server))
    assert ours.status_code == 200
    texts = [IDENTITY.sub("", answer.text) for answer in (ours, theirs)]
    assert NUMBER.sub("", texts[0]) == NUMBER.sub("", texts[1])
    numbers = ([float(each) for each in NUMBER.findall(text)] for text in texts)
    assert next(numbers) == pytest.approx(next(numbers), abs=1e-4)
    assert ours.headers.keys() == theirs.headers.keys()
    assert ours.headers["x-compute-tokens"] == theirs.headers["x-compute-tokens"]


@pytest.fixture(params=["by-route", "by-base"])
def client(request: pytest.FixtureRequest, server: Server) -> Callable[[str], InferenceClient]:
    """Return a function of a route: a client of the route, or of the server's address alone."""
    if request.param == "by-route":
        return lambda route: InferenceClient(model=server.url + route, token="hf_test", timeout=30)
    return lambda _: InferenceClient(base_url=server.url, token="hf_test", timeout=30)


def test_the_client_of_hugging_face_reads_answers_and_errors(
    client: Callable[[str], InferenceClient],
) -> None:
    predictions = client("/fill-mask").fill_mask("Paris is the [MASK] of France.", top_k=3)
    scores = [prediction.score for prediction in predictions]
    assert (len(scores), scores) == (3, sorted(scores, reverse=True))
    chosen = client("/fill-mask").fill_mask("the [MASK]", targets=["king", "moon"])
    assert {prediction.token_str for prediction in chosen} == {"king", "moon"}
    texts = ["the king", "the king", "a moon over the sea"]
    found = client("/similarity").sentence_similarity(texts[0], other_sentences=texts[1:])
    vectors = [client("/embed").feature_extraction(text, normalize=True)[0] for text in texts]
    assert found == pytest.approx([float(vectors[0] @ vector) for vector in vectors[1:]], abs=1e-5)
    context = "Paris is the capital of France."
    answer = client("/qa").question_answering(question="What is Paris?", context=context)
    assert context[answer.start : answer.end] == answer.answer
    answers = client("/qa").question_answering(
        question="What is Paris?", context=context, top_k=2, max_seq_len=64, doc_stride=8
    )
    assert len(answers) == 2
    with pytest.raises((HfHubHTTPError, ValidationError), match=r"inputs\.sentences is"):
        client("/similarity").sentence_similarity("a", other_sentences=[])
