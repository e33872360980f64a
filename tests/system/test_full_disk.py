"""A disk that is full: the server goes on with what it has, and writes again when it can."""

import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.mmap_dict import MmapedDict

from cloze.service.observe.processes import ReservedValues
from tests.support.command import call
from tests.support.serving import children, running_server
from tests.support.virtual_time import VirtualClock
from tests.support.waiting import wait_until

IN_A_SMALL_DISK = (
    *("unshare", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=2m tmpfs "$TMPDIR" && exec "$@"',
    "sh",
)


def test_a_full_disk_ends_no_process(tiny_store: Path, tmp_path: Path) -> None:
    """The metrics are mapped files, and a page without space would end the process (SIGBUS)."""
    done = call(*IN_A_SMALL_DISK, "true", check=False, env=os.environ | {"TMPDIR": str(tmp_path)})
    if done.returncode:
        pytest.skip(f"no small disk can be mounted: {done.stderr.strip()}")
    command = (*IN_A_SMALL_DISK, sys.executable, "-m", "cloze", "serve")
    arguments = ("--model", "bert", "--frontends", "2")
    with running_server(tiny_store, *arguments, command=command, TMPDIR=str(tmp_path)) as server:
        pid = server.process.pid
        processes = children(pid, "")
        filler = Path(f"/proc/{pid}/root{tmp_path}/filler")
        with pytest.raises(OSError, match="No space left"), filler.open("wb", 0) as file:
            while True:
                file.write(bytes(4096))

        def embeds() -> int:
            return httpx.post(f"{server.url}/embed", json={"inputs": "a walk"}).status_code

        def counted() -> float:
            text = httpx.get(f"{server.url}/metrics").text
            found = re.findall(r'cloze_requests_total\{.*"/embed",status="200".* (.*)', text)
            return sum(map(float, found))

        assert {embeds() for _ in range(20)} == {200}
        for route in ("nothing", "embed", "tokenize", "v1/embeddings", "qa"):  # further values
            assert httpx.post(f"{server.url}/{route}", json={}).is_client_error
        assert counted() <= 20
        assert children(pid, "") == processes
        filler.unlink()
        sent = 20

        def counts_all() -> bool:
            nonlocal sent
            sent += embeds() == 200
            return counted() == sent

        wait_until(counts_all)
        os.kill(children(pid, "frontend")[0], signal.SIGKILL)
        wait_until(lambda: len({*children(pid, "")} - {*processes}) == 1)
        assert embeds() == 200


@contextmanager
def space(most: int) -> Iterator[None]:
    """Let no file have more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_values_wait_for_space(tmp_path: Path) -> None:
    path, clock = tmp_path / "counter_one.db", VirtualClock()
    with space(1000):
        values = ReservedValues(str(path), clock)
        assert values.read_value("key") == (0.0, 0.0)
        values.write_value("key", 1.0, 2.0)
        assert values.read_value("key") == (1.0, 2.0)
    assert not list(tmp_path.iterdir()), "a scrape cannot read it"
    keys = [f"{'long' * 30} {number}" for number in range(500)]
    clock.sleep(1.0)
    with space(65_536):
        for key in keys:
            values.write_value(key, 3.0, 4.0)
    held = dict(_read(path))
    assert 100 < len(held) < 500
    clock.sleep(1.0)
    values.write_value("key", 5.0, 6.0)
    assert dict(_read(path)) == dict.fromkeys(keys, 3.0) | {"key": 5.0}
    assert path.stat().st_size == 131_072
    values.close()
    following = ReservedValues(str(path))
    assert following.read_value(keys[0]) == (3.0, 4.0), "the next process goes on"
    following.close()


def _read(path: Path) -> Iterator[tuple[str, float]]:
    for key, value, *_ in MmapedDict.read_all_values_from_file(str(path)):
        yield key.strip(), value
