"""Probes, the served models, metrics and reloads: what operators get."""

import hashlib
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from cloze.service.http.keys import Keys
from cloze.service.http.record import Callers
from cloze.service.protocols import operations
from cloze.service.tasks import TASKS
from tests.support.route_service import CLASSIFIER, Service, State

CODES = {
    "dead": "engine_dead",
    "restarting": "engine_dead",
    "draining": "shutting_down",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("bundle")) as made:
        yield made


def states() -> dict[str, State]:
    return {
        "healthy": State(),
        "draining": State(draining=True),
        "dead": State("it hangs"),
        "restarting": State("it hangs", restarts_engines=True),
    }


@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        ("/healthz", {"healthy": 200, "draining": 200, "dead": 503, "restarting": 200}),
        ("/", {"healthy": 200, "draining": 200, "dead": 503, "restarting": 200}),
        ("/readyz", {"healthy": 200, "draining": 503, "dead": 503, "restarting": 503}),
        ("/health", {"healthy": 200, "draining": 503, "dead": 503, "restarting": 503}),
        ("/v2/health/live", {"healthy": 200, "draining": 200, "dead": 503, "restarting": 200}),
        ("/v2/health/ready", {"healthy": 200, "draining": 503, "dead": 503, "restarting": 503}),
        ("/v2/models/tiny.embed/ready", {"healthy": 200, "draining": 503, "dead": 503}),
    ],
)
def test_probes_follow_the_state(service: Service, path: str, statuses: dict[str, int]) -> None:
    for name, status in statuses.items():
        vars(service.state).update(vars(states()[name]))
        response = service.get(path)
        assert response.status_code == status, name
        if status == 503:
            assert response.headers["retry-after"] == "1"
            assert response.headers["x-error-code"] == CODES[name]
    vars(service.state).update(vars(State()))


def test_answers_of_probes(service: Service) -> None:
    for path, body in (
        ("/healthz", b'{"status":"alive"}'),
        ("/", b'{"status":"alive"}'),  # KServe's clients ask there; browsers get a page
        ("/readyz", b'{"status":"ready"}'),
        ("/health", b""),
        ("/v2/health/live", b'{"live":true}'),
        ("/v2/health/ready", b'{"ready":true}'),
    ):
        assert service.get(path).content == body


def test_probes_that_are_answered_at_once_follow_the_state_too() -> None:
    for name, state in states().items():
        bodies = operations.probe_bodies(state)
        assert bodies.keys() == {b"/healthz", b"/readyz"}
        alive = b'{"status":"alive"}' if name != "dead" else None
        ready = b'{"status":"ready"}' if name == "healthy" else None
        assert (bodies[b"/healthz"](), bodies[b"/readyz"]()) == (alive, ready), name


def test_what_is_said_of_the_models(service: Service) -> None:
    embedding = {
        "dimensions": 4, "pooling": "mean", "normalize": True, "max_tokens": 10, "projected": False,
    }  # fmt: skip
    served = [name for name in TASKS if name != "zero-shot-classification"]  # no label entails
    info = service.get("/info").json()
    [model] = info.pop("models")
    assert info == {
        "model_id": "tiny", "model_sha": None, "model_dtype": "fp32",
        "model_type": {"embedding": {"pooling": "mean"}}, "max_input_length": 10,
        "max_client_batch_size": 3, "max_request_bytes": 200_000,
        "version": version("cloze-server"), "defaults": dict.fromkeys(served, "tiny@3"),
    }  # fmt: skip
    described = model.pop("embedding")
    assert {name: described[name] for name in embedding} == embedding
    assert model.pop("source")["location"] == "x"
    roles = model.pop("roles")
    own, spaces = model.pop("embedding_space"), model.pop("embedding_spaces")
    assert spaces.keys() == {"embed", "embed-all", "embed-sparse"}
    assert (spaces["embed"], len(set(spaces.values()))) == (own, 3)
    assert (len(own), roles["change_vectors"], roles["query"]["prompt_name"]) == (16, True, "query")
    assert roles["document"] == {"prompt_name": None, "embedding_space": own}
    assert roles["query"]["embedding_space"] != own
    assert model == {
        "name": "tiny", "version": 3, "aliases": [], "tasks": served, "family": "bert", "parameters": 100,
        "precision": "fp32", "max_tokens": 12, "license": None,
        "scores": {
            "fill-mask": "probability", "score": "log-probability", "similarity": "cosine",
            "nsp": "probability", "qa": "probability", "text-classification": "probability",
            "token-classification": "probability", "redact": "probability", "entities": "probability", "rerank": "cosine",
        },
    }  # fmt: skip


def test_models_without_embeddings(tmp_path: Path) -> None:
    masks: dict[str, Any] = {
        "name": "masks", "tasks": ("fill-mask",), "embedding": None, "heads": {},
    }  # fmt: skip
    with Service(tmp_path, [masks, {}]) as both:
        info = both.get("/info").json()
        assert info["model_id"] == "tiny", "the default of embed is shown"
        assert [model["name"] for model in info["models"]] == ["masks", "tiny"]
        assert info["models"][0]["embedding"] is None
    with Service(tmp_path, [masks, {}], tasks={"fill-mask": TASKS["fill-mask"]}) as few:
        info = few.get("/info").json()
        assert (info["model_id"], info["max_input_length"], info["model_type"]) == ("masks", 12, {})
        assert info["defaults"] == {"fill-mask": "masks@3"}


@pytest.mark.parametrize(("labels", "kind"), [(["fits"], "reranker"), (["a", "b"], "classifier")])
def test_models_with_labels(tmp_path: Path, labels: list[str], kind: str) -> None:
    """As text-embeddings-inference says it, which Dify reads before it saves a reranker."""
    heads = {"sequence_classification": {"labels": labels, "problem_type": "regression"}}
    with Service(tmp_path, [CLASSIFIER | {"heads": heads}]) as made:
        described = made.get("/info").json()["model_type"]
        numbers = {label: number for number, label in enumerate(labels)}
        ids = {str(number): label for label, number in numbers.items()}
        assert described == {kind: {"id2label": ids, "label2id": numbers}}
        status = made.get("/v1/models/classes").json()
        assert status["model_type"] == ("rerank" if kind == "reranker" else None)


def test_metrics_in_the_format_that_is_accepted(service: Service) -> None:
    response = service.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "cloze_" in response.text
    response = service.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert response.headers["content-type"].startswith("application/openmetrics-text")


def test_a_scrape_does_not_run_on_the_event_loop(service: Service) -> None:
    readers: list[str] = []
    service.metrics.unready_reason = lambda: readers.append(threading.current_thread().name)
    assert service.get("/metrics").status_code == 200
    [reader] = readers
    assert reader.startswith("scrape")
    assert reader != threading.current_thread().name


def test_who_may_reload(tmp_path: Path, service: Service) -> None:
    changes = {"added": ["a@2"], "removed": ["a@1"], "kept": [], "reasons": {}, "refused": {}}
    response = service.ask("POST", "/admin/reload")
    assert response.status_code == 403
    assert service.seen.error == "forbidden"
    service.state.has_engines = False
    assert service.ask("POST", "/admin/reload").json() == changes, "the state refuses on its own"
    digest = hashlib.sha256(b"secret").hexdigest()
    (tmp_path / "keys").write_text(f'[a]\nsha256 = "{digest}"\nscopes = ["admin"]\n')
    with Service(tmp_path, callers=Callers(keys=Keys(tmp_path / "keys"))) as guarded:
        response = guarded.ask("POST", "/admin/reload")
        assert response.json() == changes, "the access control has checked the key"
        assert response.headers["content-type"] == "application/json"
