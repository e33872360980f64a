"""Requests of Weaviate's module text2vec-transformers, as its client sends them."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.route_service import OTHER_VECTOR, VECTOR, Service
from tests.support.task_model import bundle

PROMPTS = {"prompts": {"query": "who of", "passage": ""}}


def sent(text: str, **config: Any) -> dict[str, Any]:
    """Return a body as Weaviate's client writes it, with the fields of an answer."""
    config = {"pooling_strategy": "masked_mean", "task_type": "passage"} | config
    return {"text": text, "dims": 0, "vector": None, "error": "", "config": config}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A model with a prompt for queries, and one with another pooling."""
    folder = tmp_path_factory.mktemp("bundle")
    own = bundle(folder).manifest.embedding
    assert own is not None
    prompts = own.model_dump() | PROMPTS
    cls = own.model_dump() | {"pooling": "cls"}
    models: Any = ({"embedding": prompts}, {"name": "cls", "embedding": cls})
    with Service(folder, models) as made:
        yield made


def test_an_answer_is_the_request_with_its_vector(service: Service) -> None:
    """The hand engine has another vector for a text with a prompt: `VECTOR` is of one word."""
    passage = service.post("/vectors", sent("the", normalize=False))
    assert passage.json() == {"text": "the", "dims": 4, "vector": [0.6, 0.0, 0.8, 0.0]}
    assert passage.headers["x-warning"] == "ignored unknown fields: normalize"
    query = service.post("/vectors", sent("the", task_type="query")).json()
    assert query["vector"] == [0.0, 0.0, 1.0, 0.0]
    assert VECTOR != OTHER_VECTOR
    several = {"texts": ["the", "of the"], "config": {"dimensions": 3, "task_type": ""}}
    answer = service.post("/vectors", several).json()
    assert answer["dims"] == 3
    assert [len(vector) for vector in answer["vectors"]] == [3, 3]
    assert service.post("/vectors", {"text": "the"}).json()["dims"] == 4


def test_pooling_is_the_models_own_or_named(service: Service) -> None:
    """Weaviate sends masked_mean unless it is told otherwise, so that is no error."""
    assert "x-warning" not in service.post("/vectors", sent("the")).headers
    other = service.post("/vectors", sent("the") | {"model": "cls"})
    assert other.headers["x-warning"].startswith("ignored pooling_strategy: cls@")
    own = service.post("/vectors", sent("the", pooling_strategy="cls") | {"model": "cls"})
    assert (own.status_code, "x-warning" in own.headers) == (200, False)


def test_probes_and_meta(service: Service) -> None:
    assert service.get("/meta").json().items() >= {"model": "tiny@3", "dimensions": 4}.items()
    for path in ("/.well-known/live", "/.well-known/ready"):
        assert (service.get(path).status_code, service.get(path).content) == (204, b"")
    service.state.draining = True
    assert service.get("/.well-known/ready").status_code == 503
    assert service.get("/.well-known/live").status_code == 204
    service.state.draining = False
