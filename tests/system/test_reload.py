"""A running server serves what the store holds by then, and loses no request meanwhile."""

import hashlib
import http.client
import json
import re
import shutil
import signal
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from tests.support.certificates import make_certificate
from tests.support.crafted import read_body, seal
from tests.support.faulty import FAULTY, wait_for_run
from tests.support.serving import Server, children, running_server
from tests.support.waiting import wait_until

KEY = "the-key-of-an-operator"
HEADERS = {"authorization": f"Bearer {KEY}"}

SPELLINGS = ("/admin/reload", "/%61dmin/reload", "/admin%2Freload", "http://localhost/admin/reload")
"""Targets of requests that another server could take for one path."""


@pytest.fixture
def store(tmp_path: Path, checkpoints: dict[str, Path]) -> Store:
    """Return a store with ``bert@1``."""
    store = Store(tmp_path / "store")
    export(str(checkpoints["bert"]), "bert", store)
    return store


def publish_other(store: Store, checkpoints: dict[str, Path]) -> None:
    """Publish other weights as the next version of ``bert``."""
    export(str(checkpoints["distilbert"]), "bert", store, ExportOptions(tasks=("embed",)))


def keys_in(folder: Path) -> dict[str, str]:
    """Write a file with the key of an operator; return the setting that names the file."""
    keys, digest = folder / "keys.toml", hashlib.sha256(KEY.encode()).hexdigest()
    keys.write_text(f'[ops]\nsha256 = "{digest}"\nscopes = ["admin", "inference"]\n')
    return {"CLOZE_KEYS_FILE": str(keys)}


def ask(server: Server) -> httpx.Response:
    """Ask for a reload with the key of an operator."""
    return httpx.post(f"{server.url}/admin/reload", headers=HEADERS, timeout=60)


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
    store: Store, checkpoints: dict[str, Path]
) -> None:
    """Each answer is wholly of the model that its header names."""
    with running_server(store.root) as server, Load(server) as load:
        wait_until(lambda: load.seen("bert@1"))
        publish_other(store, checkpoints)
        assert server.reload() == "reloaded: added bert@2; removed bert@1"
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
    store: Store, checkpoints: dict[str, Path]
) -> None:
    with running_server(store.root) as server:
        publish_other(store, checkpoints)
        manifest = store.root / "bert" / "2" / "manifest.json"
        good = manifest.read_text()
        manifest.write_text(good.replace("embed", "embod", 1))
        assert re.match("nothing was reloaded: .*bert@2", server.reload())
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
        assert "added bert@2" in server.reload()
        wait_until(lambda: counted() == {"ok": 1, "failed": 1, "last": 1})


def test_a_model_that_is_kept_although_a_newer_one_exists_has_a_reason(
    store: Store, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with running_server(store.root, CLOZE_MODEL="bert@1", **keys_in(tmp_path)) as server:
        publish_other(store, checkpoints)
        changes = ask(server).json()
        assert (changes["added"], changes["kept"]) == ([], ["bert@1"])
        reason = changes["reasons"]["bert@1"]
        assert "bert@2 is newer: start the server again, with --model bert to follow" in reason
        wait_until(lambda: any(f"kept bert@1 ({reason})" in line for line in server.log))


def test_a_third_snapshot_waits_for_the_first(
    store: Store, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A request for a reload is refused at once; a signal is remembered."""
    starting = running_server(store.root, command=FAULTY, **keys_in(tmp_path))
    with starting as server, ThreadPoolExecutor() as threads:
        publish_other(store, checkpoints)
        asked = {"json": {"inputs": "river"}, "headers": HEADERS, "timeout": 30}
        slow = threads.submit(httpx.post, f"{server.url}/embed", **asked)
        wait_for_run(server, "river")
        assert ask(server).json()["added"] == ["bert@2"]
        refused = ask(server)
        assert (refused.status_code, refused.json()["code"]) == (409, "reload_refused")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: any("a reload waits" in line for line in server.log))
        assert not any("kept bert@2" in line for line in server.log)
        assert slow.result().headers["x-model"] == "bert@1"
        wait_until(lambda: any("reloaded: kept bert@2" in line for line in server.log))


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


def resources(pid: int) -> tuple[int, int]:
    """Return the number of threads and of open files of a process."""
    threads, files = (len(list(Path(f"/proc/{pid}/{kind}").iterdir())) for kind in ("task", "fd"))
    return threads, files


def test_a_refused_reload_changes_nothing(store: Store) -> None:
    """Not the metrics, the threads nor the open files."""
    with running_server(store.root) as server:
        before = shown_models(server)  # which has threads of its own
        assert before["cloze_model_info"] == before["cloze_queue_tokens"] == {"bert"}
        add_good_and_wrong(store.root, store.root / "bert" / "1")
        server.reload()  # the first one opens files that stay open
        threads, files = resources(server.process.pid)
        for _ in range(2):
            assert server.reload().startswith("nothing was reloaded")
        assert shown_models(server) == before
        # A connection or a scrape may add one; a model has at least three of each.
        wait_until(lambda: resources(server.process.pid)[0] <= threads + 2)
        wait_until(lambda: resources(server.process.pid)[1] <= files + 4)


@pytest.mark.slow
def test_memory_returns(tmp_path: Path) -> None:
    """Reloads that replace the model leave less than half a model (13 MB) behind, in all.

    The first size may count a model that was just replaced, but no more.
    """
    sources = [DEFAULT_ROOT / name for name in ("cloze-bert", "cloze-bert-tasks")]
    store = tmp_path / "store"
    store.mkdir()
    (store / sources[1].name).symlink_to(sources[1])
    with running_server(store) as server:
        for number in range(10):
            new, old = sources[number % 2], sources[(number + 1) % 2]
            (store / old.name).unlink()
            (store / new.name).symlink_to(new)
            assert f"removed {old.name}@1" in server.reload()
            if number == 0:
                first_mb = memory_mb(server.process.pid)
        wait_until(lambda: memory_mb(server.process.pid) < first_mb + 13)


def memory_mb(pid: int) -> float:
    """The memory of a process that no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def test_keys_and_certificate_are_read_again_unless_they_cannot_be_used(
    store: Store, tmp_path: Path
) -> None:
    files = make_certificate(tmp_path)
    old = files.public.read_text()
    tls = {"CLOZE_TLS_CERTIFICATE": str(files.public), "CLOZE_TLS_KEY": str(files.private)}
    with running_server(store.root, **keys_in(tmp_path), **tls) as server:
        host, port = server.url.removeprefix("https://").split(":")
        assert httpx.post(f"{server.url}/admin/reload", verify=False).status_code == 401
        make_certificate(tmp_path)
        new = files.public.read_text()
        server.reload()
        for file, wrong in (
            (tmp_path / "keys.toml", "[broken\n"),
            (files.public, "nothing"),
            (files.public, old),  # it does not fit the new key
        ):
            good = file.read_text()
            file.write_text(wrong)
            assert server.reload().startswith("nothing was reloaded"), wrong
            file.write_text(good)
        served = ssl.get_server_certificate((host, int(port)))
        assert served.split() == new.split() != old.split()


@pytest.mark.parametrize("front_ends", [0, 1])
def test_without_keys_no_request_reloads(
    servers: Callable[[tuple[str, ...]], Server], front_ends: int
) -> None:
    """A proxy on the same machine may pass on the request of anybody, and change nothing in it."""
    server = servers(("--frontends", "2") if front_ends else ())
    refusal = (409, "needs a roll of the replicas") if front_ends else (403, "by SIGHUP only")
    before = children(server.process.pid, "")
    for target in SPELLINGS:
        status, body = raw_post(server, target)
        expected = (404, "there is no route") if "%" in target else refusal
        assert (status, expected[1] in body) == (expected[0], True), body
    if front_ends:
        assert "needs a roll of the replicas" in server.reload()
    assert httpx.post(f"{server.url}/embed", json={"inputs": "river"}).status_code == 200
    assert children(server.process.pid, "") == before
