"""Probes, the served models, metrics and reloads: what operators get."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloze.service.http.keys import Keys
from cloze.service.http.record import Callers
from cloze.service.protocols import operations
from tests.support.route_service import Service, State

CODES = {"dead": "engine_dead", "restarting": "engine_dead", "draining": "shutting_down"}


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
    ("path", "told", "good", "body"),
    [
        ("/healthz", "alive", 200, b'{"status":"alive"}'),
        ("/", "alive", 200, b'{"status":"alive"}'),  # as KServe asks; browsers get a page
        ("/readyz", "ready", 200, b'{"status":"ready"}'),
        ("/health", "ready", 200, b""),
        ("/v2/health/live", "alive", 200, b'{"live":true}'),
        ("/v2/health/ready", "ready", 200, b'{"ready":true}'),
        ("/v2/models/tiny.embed/ready", "ready", 200, None),
        ("/ping", "ready", 200, None),
        ("/.well-known/live", "alive", 204, b""),
        ("/.well-known/ready", "ready", 204, b""),
    ],
)
def test_probes_follow_the_state(
    service: Service, path: str, told: str, good: int, body: bytes | None
) -> None:
    for name, state in states().items():
        is_good = name == "healthy" or (told == "alive" and name != "dead")
        vars(service.state).update(vars(state))
        response = service.get(path)
        status = good if is_good else 503
        assert response.status_code == status, name
        assert body is None or not is_good or response.content == body
        if status == 503:
            assert response.headers["retry-after"] == "1"
            assert response.headers["x-error-code"] == CODES[name]
    vars(service.state).update(vars(State()))


def test_probes_that_are_answered_at_once_follow_the_state_too() -> None:
    for name, state in states().items():
        bodies = operations.probe_bodies(state)
        assert bodies.keys() == {b"/healthz", b"/readyz"}
        alive = b'{"status":"alive"}' if name != "dead" else None
        ready = b'{"status":"ready"}' if name == "healthy" else None
        assert (bodies[b"/healthz"](), bodies[b"/readyz"]()) == (alive, ready), name


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
