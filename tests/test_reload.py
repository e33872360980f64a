"""A running server serves what the store holds by then, and loses no request meanwhile."""

import os
import shutil
import signal
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from tests.certificates import make_certificate
from tests.serving import Server, children, running_server
from tests.waiting import wait_until

Start = Callable[..., AbstractContextManager[Server]]


def start(*mode: str) -> Start:
    @contextmanager
    def run(store: Path, **environment: str) -> Iterator[Server]:
        with running_server(store, *mode, **environment) as server:
            # A process that still starts would not find the bundles that a test removes.
            wait_until(
                lambda: not mode or any("front ends are ready" in line for line in server.log)
            )
            yield server

    return run


@pytest.fixture(params=[start(), start("--frontends", "2")], ids=["one-process", "front-ends"])
def serve(request: pytest.FixtureRequest) -> Start:
    """Start a server in each of the two forms."""
    chosen: Start = request.param
    return chosen


@pytest.fixture
def store(tmp_path: Path, checkpoints: dict[str, Path]) -> Store:
    """Return a store with ``bert@1``."""
    store = Store(tmp_path / "store")
    export(str(checkpoints["bert"]), "bert", store)
    return store


def publish_other(store: Store, checkpoints: dict[str, Path]) -> None:
    """Publish other weights as the next version of ``bert``."""
    export(str(checkpoints["distilbert"]), "bert", store, ExportOptions(tasks=("embed",)))


def reload(server: Server, status: int = 200) -> dict[str, list[str]]:
    response = httpx.post(f"{server.url}/admin/reload", timeout=60)
    assert response.status_code == status, response.text
    body: dict[str, list[str]] = response.json()
    return body


def embedding(answer: httpx.Response) -> np.ndarray:
    return np.array(answer.json()[0])


class Load:
    """Clients that send requests one after another on connections that stay open."""

    def __init__(self, server: Server) -> None:
        self.answers: list[tuple[int, str, np.ndarray]] = []
        self.errors: list[Exception] = []
        self._server = server
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(4)]

    def _send(self) -> None:
        try:
            with httpx.Client(timeout=30) as client:
                while not self._ended.is_set():
                    answer = client.post(f"{self._server.url}/embed", json={"inputs": "river"})
                    self.answers.append(
                        (answer.status_code, answer.headers["x-model"], embedding(answer))
                    )
        except Exception as error:
            self.errors.append(error)

    def seen(self, model: str, count: int = 20) -> bool:
        return self.errors or sum(name == model for _, name, _ in self.answers) >= count

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def test_a_new_version_is_served_without_a_failed_request(
    serve: Start, store: Store, checkpoints: dict[str, Path]
) -> None:
    """Each answer is wholly of the model that its header names."""
    with serve(store.root) as server, Load(server) as load:
        wait_until(lambda: load.seen("bert@1"))
        publish_other(store, checkpoints)
        assert reload(server) == {"added": ["bert@2"], "removed": ["bert@1"], "kept": []}
        after = httpx.post(f"{server.url}/embed", json={"inputs": "river"})
        assert after.headers["x-model"] == "bert@2"
        wait_until(lambda: load.seen("bert@2"))
    assert not load.errors
    assert {status for status, _, _ in load.answers} == {200}
    vectors = {model: vector for _, model, vector in load.answers}
    assert not np.allclose(vectors["bert@1"], vectors["bert@2"], atol=1e-2)
    for _, model, vector in load.answers:
        np.testing.assert_allclose(vector, vectors[model], atol=1e-5)


def test_what_is_bad_is_refused_and_the_old_stays(
    serve: Start, store: Store, checkpoints: dict[str, Path]
) -> None:
    with serve(store.root) as server:
        publish_other(store, checkpoints)
        manifest = store.root / "bert" / "2" / "manifest.json"
        good = manifest.read_text()
        manifest.write_text(good.replace("embed", "embod", 1))
        message = reload(server, 409)["error"]
        assert "nothing was reloaded" in message
        assert "bert@2" in message
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "river"})
        assert answer.headers["x-model"] == "bert@1"
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        manifest.write_text(good)
        assert reload(server)["added"] == ["bert@2"]


def test_models_come_stay_and_go(serve: Start, store: Store, checkpoints: dict[str, Path]) -> None:
    """By SIGHUP, which the log answers."""
    with serve(store.root) as server:
        export(str(checkpoints["bert-qa"]), "qa", store)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: any("reloaded: added qa@1; kept bert@1" in line for line in server.log))
        question = {"inputs": {"question": "who walked", "context": "the owl walked home"}}
        assert httpx.post(f"{server.url}/qa", json=question).status_code == 200
        shutil.rmtree(store.root / "qa")
        assert reload(server) == {"added": [], "removed": ["qa@1"], "kept": ["bert@1"]}
        gone = httpx.post(f"{server.url}/qa", json=question)
        assert gone.status_code == 424
        assert httpx.get(f"{server.url}/info").json()["models"][0]["name"] == "bert"


def test_requests_that_run_end_with_the_old_model(
    store: Store, checkpoints: dict[str, Path]
) -> None:
    """In one process: the request is slow, and the reload does not wait for it."""
    command = (sys.executable, "-m", "tests.faulty_server")
    with (
        running_server(store.root, command=command) as server,
        httpx.Client(timeout=30) as client,
    ):
        answers: list[httpx.Response] = []
        slow = threading.Thread(
            target=lambda: answers.append(
                client.post(f"{server.url}/embed", json={"inputs": "river"})
            )
        )
        slow.start()
        wait_until(lambda: any("a run with river starts" in line for line in server.log))
        publish_other(store, checkpoints)
        assert reload(server)["added"] == ["bert@2"]
        assert not answers
        slow.join()
        assert answers[0].status_code == 200
        assert answers[0].headers["x-model"] == "bert@1"


def test_two_at_once_are_both_answered(serve: Start, store: Store) -> None:
    with serve(store.root) as server:
        found: list[dict[str, list[str]]] = []
        threads = [threading.Thread(target=lambda: found.append(reload(server))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [{"added": [], "removed": [], "kept": ["bert@1"]}] * 3


def test_old_processes_end_and_new_ones_are_kept_running(
    store: Store, checkpoints: dict[str, Path]
) -> None:
    with running_server(store.root, "--frontends", "2", CLOZE_IDLE_TIMEOUT_MS="1000") as server:
        supervisor = server.process.pid
        old = [*children(supervisor, 'engine-0"'), *children(supervisor, 'frontend-1"')]
        with httpx.Client() as client:  # a connection that stays open and idle
            client.get(f"{server.url}/healthz")
            reload(server)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in old))
        (engine,) = children(supervisor, 'engine-0.2"')
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: children(supervisor, 'engine-0.2"') not in ([], [engine]))
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "river"}, timeout=30)
        assert answer.status_code == 200
        reload(server)
        wait_until(lambda: bool(children(supervisor, 'engine-0"')))  # the name is free again


def test_memory_returns(serve: Start, tmp_path: Path) -> None:
    """Reloads that replace the model leave less than half a model (13 MB) behind, in all.

    The first size may count a model that was just replaced, but no more.
    """
    sources = [DEFAULT_ROOT / name for name in ("cloze-bert", "cloze-bert-qa")]
    store = tmp_path / "store"
    store.mkdir()
    (store / sources[1].name).symlink_to(sources[1])
    with serve(store, CLOZE_IDLE_TIMEOUT_MS="1000") as server:
        for number in range(10):
            new, old = sources[number % 2], sources[(number + 1) % 2]
            (store / old.name).unlink()
            (store / new.name).symlink_to(new)
            assert reload(server)["removed"] == [f"{old.name}@1"]
            wait_until(lambda: len(processes(server.process.pid)) in (1, 4))
            if number == 0:
                first_mb = memory_mb(server.process.pid)
        wait_until(lambda: memory_mb(server.process.pid) < first_mb + 13)


def processes(pid: int) -> list[int]:
    """The process and its children."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [pid, *map(int, text.split())]


def memory_mb(pid: int) -> float:
    """The memory of a server that no other process shares."""
    total = 0
    for process in processes(pid):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Private"))
    return total / 1024


@contextmanager
def guarded(store: Store, folder: Path) -> Iterator[tuple[Server, Path]]:
    keys = folder / "keys.toml"
    keys.write_text(f'[ops]\nsha256 = "{"0" * 64}"\nscopes = ["admin"]\n')
    with running_server(store.root, CLOZE_KEYS_FILE=str(keys)) as server:
        yield server, keys


def test_a_bad_keys_file_refuses_the_reload(store: Store, tmp_path: Path) -> None:
    with guarded(store, tmp_path) as (server, keys):
        assert httpx.post(f"{server.url}/admin/reload").status_code == 401
        keys.write_text("[broken\n")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: any("nothing was reloaded" in line for line in server.log))


def test_without_keys_neither_a_page_nor_a_proxy_can_reload(store: Store) -> None:
    with running_server(store.root) as server:
        for name in ("X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"):
            passed_on = httpx.post(f"{server.url}/admin/reload", headers={name: "10.0.0.1"})
            assert passed_on.status_code == 403
            assert "from its own machine only" in passed_on.json()["error"]
        refused = httpx.post(
            f"{server.url}/admin/reload", headers={"origin": "http://evil.example"}
        )
        assert refused.status_code == 403
        assert "a page cannot reload" in refused.json()["error"]


def test_the_certificate_is_read_again(serve: Start, store: Store, tmp_path: Path) -> None:
    """An open connection goes on with the old one; a broken one is refused."""
    first = make_certificate(tmp_path)
    old = first.public.read_text()
    tls = {"CLOZE_TLS_CERTIFICATE": str(first.public), "CLOZE_TLS_KEY": str(first.private)}
    body = {"inputs": "a walk"}
    with (
        serve(store.root, **tls) as server,
        httpx.Client(base_url=server.url, verify=ssl.create_default_context(cadata=old)) as client,
    ):
        assert client.post("/embed", json=body).status_code == 200
        make_certificate(tmp_path)
        new = first.public.read_text()
        assert client.post("/admin/reload", timeout=60).status_code == 200
        host, port = server.url.removeprefix("https://").split(":")

        def served() -> str:
            return ssl.get_server_certificate((host, int(port)))

        wait_until(lambda: served().split() == new.split())
        assert new != old
        for public in ("nothing", old):  # the old one does not fit the new key
            first.public.write_text(public)
            trusting = ssl.create_default_context(cadata=new)
            refused = httpx.post(f"{server.url}/admin/reload", verify=trusting, timeout=60)
            assert refused.status_code == 409
            reason = "or its key cannot be used"  # a front end says it in the log
            assert reason in refused.json()["error"] or any(reason in line for line in server.log)
            assert served().split() == new.split()
        with httpx.Client(verify=ssl.create_default_context(cadata=new)) as fresh:
            assert fresh.post(f"{server.url}/embed", json=body).status_code == 200
