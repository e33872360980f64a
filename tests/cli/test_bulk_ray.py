"""`cloze bulk --ray` on a real Ray, in an environment of its own, while its workers are killed.

Ray needs a quarter of a gigabyte, so the development environment does without it. Where the
environment cannot be installed, the tests skip and say why.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from uv import find_uv_bin

from tests.support.bulk_runs import bulk, numbered, read, write
from tests.support.released_clients import install
from tests.support.serving import bare_environment
from tests.support.sources import python_path
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with the extras `cpu` and `ray`."""
    folder = tmp_path_factory.mktemp("ray") / "environment"
    uv, python = find_uv_bin(), folder / "bin" / "python"
    install(uv, "venv", "--quiet", "--python", sys.executable, str(folder))
    install(
        uv, "pip", "install", "--quiet", "--python", str(python),
        "--constraint", str(ROOT / "constraints.txt"), "--requirements", str(ROOT / "pyproject.toml"),
        "--extra", "cpu", "--extra", "bulk", "--extra", "ray",
    )  # fmt: skip
    return python


def start(python: Path, store: Path, *arguments: object) -> "subprocess.Popen[str]":
    """Start a run on a new cluster of two cores."""
    words = (*arguments, "--model-store", store, "--ray-address", "local", "--ray-workers", 2)
    return subprocess.Popen(
        [str(python), "-m", "cloze", "bulk", *map(str, words)],
        env=bare_environment(PYTHONPATH=python_path()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def workers(root: int) -> list[int]:
    """Return the processes of a run's Ray workers."""
    parents = {}
    for folder in Path("/proc").iterdir():
        try:
            status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            parents[int(folder.name)] = (int(status[1]), (folder / "cmdline").read_text())
        except (OSError, ValueError):
            continue  # no process, or one that has ended

    def belongs(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid][0]
        return pid == root

    return [
        pid
        for pid, (_, command) in parents.items()
        if command.startswith("ray::MapWorker") and "ShardWriters" in command and belongs(pid)
    ]


def test_killed_workers_lose_and_double_no_row(
    python: Path, tiny_store: Path, tmp_path: Path
) -> None:
    rows = numbered(6_000)
    rows[77]["text"] = None
    source, output = write(tmp_path / "in.parquet", rows), tmp_path / "out"
    arguments = ("embed", source, "--output", output, "--shard-rows", 60, "--json")
    process = start(python, tiny_store, *arguments)
    killed: list[int] = []
    try:
        for parts in (2, 10, 20):  # of 100 files
            wait_until(lambda n=parts: len([*output.glob("part-*")]) >= n, longest_s=120)
            wait_until(lambda: bool({*workers(process.pid)} - {*killed}), longest_s=60)
            victim = next(pid for pid in workers(process.pid) if pid not in killed)
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)
        assert len([*output.glob("part-*")]) < 100, "the workers were killed in the middle"
        stdout, stderr = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)
    assert process.returncode == 3, stderr
    summary = json.loads(stdout)
    assert (summary["rows"], summary["errors"], summary["files"]) == (6_000, 1, 100)
    assert summary["resumed_files"] == 0
    results = read(output)
    assert Counter(row["id"] for row in results) == dict.fromkeys(range(6_000), 1)
    assert [row["id"] for row in results] == list(range(6_000))
    assert [row["id"] for row in results if row["error"]] == [77]

    # The same rows without Ray: the same shards, and the same answers.
    alone = tmp_path / "alone"
    done = bulk(tiny_store, "embed", source, "--output", alone, "--shard-rows", 60)
    assert done.exit_code == 3
    for part in sorted(output.glob("part-*"))[::25]:
        ours = pq.read_table(alone / part.name, columns=["id", "embedding"]).to_pylist()
        theirs = pq.read_table(part, columns=["id", "embedding"]).to_pylist()
        for our, their in zip(ours, theirs, strict=True):
            assert our["id"] == their["id"]
            if our["id"] != 77:
                np.testing.assert_allclose(our["embedding"], their["embedding"], atol=1e-5)


def test_a_worker_that_cannot_open_its_engine_ends_the_run(
    python: Path, tiny_store: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", numbered(20))
    process = start(
        python, tiny_store, "embed", source, "--output", tmp_path / "cuda", "--precision", "int8"
    )
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 1
    lines = [line for line in stderr.splitlines() if line.startswith("cloze: ")]
    assert len(lines) == 1, stderr
    assert "int8" in lines[0]
