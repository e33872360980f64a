"""A running server serves what the store holds by then, and loses no request meanwhile."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.service.core import BUSY
from tests.certificates import make_certificate
from tests.crafted import read_body, seal
from tests.serving import Server, bare_environment, children, failed_start, running_server
from tests.waiting import wait_until

Start = Callable[..., AbstractContextManager[Server]]

SPELLINGS = ("/admin/reload", "/%61dmin/reload", "/admin%2Freload", "http://localhost/admin/reload")
"""Targets of requests that another server could take for one path."""


def start(*mode: str) -> Start:
    @contextmanager
    def run(store: Path, **environment: str) -> Iterator[Server]:
        admin = {"CLOZE_ADMIN_SOCKET": str(store.parent / "admin.sock")}
        with running_server(store, *mode, **admin, **environment) as server:
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


def ask(server: Server) -> httpx.Response:
    """Ask for a reload through the admin socket."""
    transport = httpx.HTTPTransport(uds=server.admin_socket)
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
        return client.post("/admin/reload")


def reload(server: Server, status: int = 200) -> Any:
    """Ask for a reload as soon as the last one has ended; return the answer."""
    answers: list[httpx.Response] = []

    def answered() -> bool:
        answers.append(ask(server))
        return answers[-1].status_code != 409 or BUSY not in answers[-1].text

    wait_until(answered)
    assert answers[-1].status_code == status, answers[-1].text
    return answers[-1].json()


def raw_post(server: Server, target: str) -> tuple[int, str]:
    """Post to exactly that target; other clients normalise it."""
    address = server.url.removeprefix("http://")
    with closing(http.client.HTTPConnection(address, timeout=30)) as connection:
        connection.request("POST", target)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


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
        assert reload(server) == {
            "added": ["bert@2"],
            "removed": ["bert@1"],
            "kept": [],
            "reasons": {},
            "refused": {},
        }
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

        def counted() -> dict[str, float]:
            text = httpx.get(f"{server.url}/metrics").text
            [last] = re.findall(r"^cloze_last_reload_successful (.*)", text, re.M)
            counts = re.findall(r'^cloze_reloads_total\{result="(\w+)"\} (.*)', text, re.M)
            return {result: float(count) for result, count in [*counts, ("last", last)]}

        wait_until(lambda: counted() == {"ok": 0, "failed": 1, "last": 0})
        manifest.write_text(good)
        assert reload(server)["added"] == ["bert@2"]
        wait_until(lambda: counted() == {"ok": 1, "failed": 1, "last": 1})


def test_models_come_stay_and_go(serve: Start, store: Store, checkpoints: dict[str, Path]) -> None:
    """By SIGHUP, which the log answers."""
    with serve(store.root) as server:
        export(str(checkpoints["bert-qa"]), "qa", store)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: any("reloaded: added qa@1; kept bert@1" in line for line in server.log))
        question = {"inputs": {"question": "who walked", "context": "the owl walked home"}}
        assert httpx.post(f"{server.url}/qa", json=question).status_code == 200
        shutil.rmtree(store.root / "qa")
        assert reload(server) == {
            "added": [],
            "removed": ["qa@1"],
            "kept": ["bert@1"],
            "reasons": {},
            "refused": {},
        }
        gone = httpx.post(f"{server.url}/qa", json=question)
        assert gone.status_code == 424
        assert httpx.get(f"{server.url}/info").json()["models"][0]["name"] == "bert"


@pytest.mark.parametrize("arguments", [(), ("--frontends", "1")], ids=["one", "front-ends"])
def test_a_model_that_is_kept_although_a_newer_one_exists_has_a_reason(
    store: Store, checkpoints: dict[str, Path], arguments: tuple[str, ...]
) -> None:
    with start(*arguments)(store.root, CLOZE_MODEL="bert@1") as server:
        publish_other(store, checkpoints)
        changes = reload(server)
        assert (changes["added"], changes["kept"]) == ([], ["bert@1"])
        reason = changes["reasons"]["bert@1"]
        assert "bert@2 is newer: start the server again, with --model bert to follow" in reason
        wait_until(lambda: any(f"kept bert@1 ({reason})" in line for line in server.log))


def test_requests_that_run_end_with_the_old_model(
    store: Store, checkpoints: dict[str, Path]
) -> None:
    """In one process: the request is slow, and the reload does not wait for it."""
    with faulty(store) as server, httpx.Client(timeout=30) as client:
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


def test_several_at_once_are_all_answered(serve: Start, store: Store) -> None:
    """Each with a reload that began after it was asked for, or a refusal that says when to ask."""
    with serve(store.root) as server, ThreadPoolExecutor() as threads:
        answers = [future.result() for future in [threads.submit(ask, server) for _ in range(4)]]
        done = [answer.json() for answer in answers if answer.status_code == 200]
        refused = [answer.json()["error"] for answer in answers if answer.status_code == 409]
        assert len(done) + len(refused) == 4
        assert done
        unchanged = {"added": [], "removed": [], "kept": ["bert@1"], "reasons": {}, "refused": {}}
        assert all(body == unchanged for body in done)
        assert set(refused) <= {BUSY}
        reload(server)


@contextmanager
def faulty(store: Store) -> Iterator[Server]:
    """Run a server in which a request with "river" takes 1.5 s."""
    admin = {"CLOZE_ADMIN_SOCKET": str(store.root.parent / "admin.sock")}
    command = (sys.executable, "-m", "tests.faulty_server")
    with running_server(store.root, command=command, **admin) as server:
        yield server


def test_a_third_service_waits_for_the_first(store: Store, checkpoints: dict[str, Path]) -> None:
    """A request for a reload is refused at once; a signal is remembered."""
    with faulty(store) as server, ThreadPoolExecutor() as threads:
        publish_other(store, checkpoints)
        body = {"inputs": "river"}
        slow = threads.submit(httpx.post, f"{server.url}/embed", json=body, timeout=30)
        wait_until(lambda: any("a run with river starts" in line for line in server.log))
        assert reload(server)["added"] == ["bert@2"]
        refused = ask(server)
        assert (refused.status_code, refused.json()["error"]) == (409, BUSY)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: any("a reload waits" in line for line in server.log))
        assert not any("kept bert@2" in line for line in server.log)
        assert slow.result().headers["x-model"] == "bert@1"
        wait_until(lambda: any("reloaded: kept bert@2" in line for line in server.log))


def test_a_third_generation_waits_for_the_first(store: Store) -> None:
    """An idle connection keeps the first generation."""
    with start("--frontends", "1")(store.root) as server:
        supervisor = server.process.pid
        with httpx.Client() as client:
            client.get(f"{server.url}/healthz")
            reload(server)
            refused = ask(server)
            assert (refused.status_code, refused.json()["error"]) == (409, BUSY)
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: any("a reload waits" in line for line in server.log))
            assert len(processes(supervisor)) == 5
            assert sum("reloaded" in line for line in server.log) == 1
        wait_until(lambda: sum("reloaded" in line for line in server.log) == 2)


def add_good_and_wrong(store: Path, bundle: Path) -> None:
    """Add a new good model, and after it one that opens but does not reproduce its outputs."""
    for name in ("x-good", "x-wrong"):
        folder = Path(shutil.copytree(bundle, store / name / "1"))
        for file in folder.glob("golden*.json") if name == "x-wrong" else ():
            goldens = json.loads(file.read_text())
            goldens[0]["outputs"]["logsumexp"] = [1.0] * len(goldens[0]["outputs"]["logsumexp"])
            file.write_text(json.dumps(goldens))
        seal(folder, read_body(folder) | {"name": name})


def shown_models(server: Server) -> dict[str, set[str]]:
    """Return the models, without version, that each metric family shows."""
    shown: dict[str, set[str]] = defaultdict(set)
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if found := re.match(r'(cloze_\w+){.*model="([^"]+)"', line):
            shown[found[1]].add(found[2])
    return shown


def resources(pid: int, *, children: bool = True) -> tuple[int, int]:
    """Return the number of threads and of open files of a process, and of its children."""
    pids = processes(pid) if children else [pid]
    threads, files = (
        sum(len(list(Path(f"/proc/{each}/{kind}").iterdir())) for each in pids)
        for kind in ("task", "fd")
    )
    return threads, files


def test_a_refused_reload_changes_nothing(serve: Start, store: Store) -> None:
    """Not the metrics, the processes, their threads nor their open files."""
    with serve(store.root) as server:
        before = shown_models(server)  # which has threads of its own
        assert before["cloze_model_info"] == before["cloze_queue_tokens"] == {"bert"}
        add_good_and_wrong(store.root, store.root / "bert" / "1")
        reload(server, 409)  # the first one opens files that stay open
        threads, files = resources(server.process.pid)
        for _ in range(2):
            assert reload(server, 409)["error"].startswith("nothing was reloaded")
        assert shown_models(server) == before
        # A connection or a scrape may add one; a model or a process has at least three of each.
        wait_until(lambda: resources(server.process.pid)[0] <= threads + 2)
        wait_until(lambda: resources(server.process.pid)[1] <= files + 4)


def test_the_series_of_replaced_models_leave(
    serve: Start, store: Store, checkpoints: dict[str, Path]
) -> None:
    """What counts no model goes on."""
    with serve(store.root, CLOZE_IDLE_TIMEOUT_MS="1000") as server:

        def counts(version: int) -> list[str]:
            labels = ('model="bert"', f'version="{version}"')
            lines = httpx.get(f"{server.url}/metrics").text.splitlines()
            return [line for line in lines if all(label in line for label in labels)]

        def not_found() -> float:
            label = 'cloze_requests_total{model="",route="other",status="404",version=""}'
            text = httpx.get(f"{server.url}/metrics").text
            found = re.findall(f"^{re.escape(label)} (.*)", text, re.M)
            return sum(map(float, found))

        assert httpx.get(f"{server.url}/nowhere").status_code == 404
        httpx.post(f"{server.url}/embed", json={"inputs": "river"}).raise_for_status()
        wait_until(lambda: any("_bucket" in line for line in counts(1)))
        publish_other(store, checkpoints)
        reload(server)
        httpx.post(f"{server.url}/embed", json={"inputs": "river"}).raise_for_status()
        wait_until(lambda: not counts(1))
        assert any("cloze_queue_tokens" in line for line in counts(2))
        assert any("cloze_requests_total" in line for line in counts(2))
        assert not_found() == 1


def test_old_processes_end_and_new_ones_are_kept_running(
    store: Store, checkpoints: dict[str, Path]
) -> None:
    with start("--frontends", "2")(store.root, CLOZE_IDLE_TIMEOUT_MS="1000") as server:
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
    sources = [DEFAULT_ROOT / name for name in ("cloze-bert", "cloze-bert-tasks")]
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


def test_refused_reloads_leave_no_memory(tmp_path: Path) -> None:
    """In one process: a model of 26 MB opens five times, and the next one fails."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "cloze-bert-tasks").symlink_to(DEFAULT_ROOT / "cloze-bert-tasks")
    with start()(store) as server:
        add_good_and_wrong(store, DEFAULT_ROOT / "cloze-bert" / "1")
        reload(server, 409)
        first_mb = memory_mb(server.process.pid)
        for _ in range(4):
            reload(server, 409)
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


@pytest.mark.parametrize("target", SPELLINGS)
def test_without_keys_only_the_admin_socket_can_reload(
    servers: dict[str, Server], target: str
) -> None:
    """A proxy on the same machine may pass on the request of anybody, and change nothing in it."""
    for server in servers.values():
        status, body = raw_post(server, target)
        if "%" in target:
            assert (status, "there is no route" in body) == (404, True)
        else:
            assert (status, "through its admin socket only" in body) == (403, True)


@pytest.fixture(scope="module")
def servers(
    tiny_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """Return a server of each form, with an admin socket."""
    path = tmp_path_factory.mktemp("admin") / "admin.sock"
    arguments = ("--model", "bert")
    with (
        running_server(tiny_store, *arguments, CLOZE_ADMIN_SOCKET=str(path)) as one,
        running_server(tiny_store, *arguments, "--frontends", "1") as front_ends,
    ):
        yield {"one": one, "front-ends": front_ends}


def test_the_admin_socket_is_its_owners(servers: dict[str, Server], tiny_store: Path) -> None:
    """A second server does not take it, and the end of the first one removes it."""
    server = servers["one"]
    path = Path(server.admin_socket)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    refused = failed_start(
        "--model-store", str(tiny_store), "--admin-socket", str(path), env=bare_environment()
    )
    assert refused == f"cloze: cannot listen on {path}: Address already in use\n"
    assert ask(server).status_code == 200


@pytest.mark.parametrize("mode", [(), ("--frontends", "1")], ids=["one-process", "front-ends"])
def test_a_socket_that_a_killed_server_left_is_replaced(
    tiny_store: Path, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
    with running_server(tiny_store, *mode, CLOZE_ADMIN_SOCKET=str(path)) as server:
        assert ask(server).status_code == 200
        assert server.stop() == 0
        assert not path.exists()


def test_what_is_no_socket_stays(tiny_store: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    arguments = ("--model-store", str(tiny_store), "--admin-socket", str(path))
    assert "Address already in use" in failed_start(*arguments, env=bare_environment())
    assert path.read_text() == "mine"


def test_the_certificate_is_read_again(serve: Start, store: Store, tmp_path: Path) -> None:
    """New connections get the new one; a broken one is refused, and no process or file stays."""
    first = make_certificate(tmp_path)
    old = first.public.read_text()
    tls = {"CLOZE_TLS_CERTIFICATE": str(first.public), "CLOZE_TLS_KEY": str(first.private)}
    body = {"inputs": "a walk"}
    with (
        serve(store.root, **tls) as server,
        httpx.Client(base_url=server.url, verify=ssl.create_default_context(cadata=old)) as client,
    ):
        assert client.post("/embed", json=body).status_code == 200
        client.close()  # else the old front ends wait for it
        make_certificate(tmp_path)
        new = first.public.read_text()
        reload(server)
        host, port = server.url.removeprefix("https://").split(":")

        def served() -> str:
            return ssl.get_server_certificate((host, int(port)))

        wait_until(lambda: served().split() == new.split())
        assert new != old
        pid = server.process.pid
        wait_until(lambda: len(processes(pid)) in (1, 4))
        _, files = resources(pid, children=False)
        for public in ("nothing", old):  # the old one does not fit the new key
            first.public.write_text(public)
            error = reload(server, 409)["error"]
            reason = "or its key cannot be used"  # a front end says it in the log
            assert reason in error or any(reason in line for line in server.log)
            assert served().split() == new.split()
            assert len(processes(pid)) in (1, 4)
        # A connection may add one; each refusal of processes would leave one at least.
        wait_until(lambda: resources(pid, children=False)[1] <= files + 1)
        with httpx.Client(verify=ssl.create_default_context(cadata=new)) as fresh:
            assert fresh.post(f"{server.url}/embed", json=body).status_code == 200
