"""The client, the command line, export and one process that serves, without what Linux has.

`tests.support.other_system` takes the means away. No real macOS and no real Windows is tried.
"""

import os
import pkgutil
import sys
from pathlib import Path

import httpx
import pytest

import cloze
from tests.support.command import call
from tests.support.other_system import ENVIRONMENT
from tests.support.serving import running_server

BEGIN = "from tests.support.other_system import run_on; run_on('win32');"
COMMAND = f"{BEGIN} from cloze.cli import main; main()"

WITHOUT = ("cloze.bulk.ray_run", "cloze.bench.apps")
"""Modules that need an extra of their own, or the environment of another library."""

LARGE = ("cloze.bench", "cloze.export")
"""Packages that take seconds to import: torch, matplotlib."""


def run(code: str, *arguments: str, status: int = 0, **environment: str) -> str:
    """Run a program on the other system; return what it printed."""
    done = call(
        sys.executable,
        "-c",
        code,
        *arguments,
        check=False,
        env=os.environ | ENVIRONMENT | environment,
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def modules(*, large: bool) -> list[str]:
    names = (each.name for each in pkgutil.walk_packages(cloze.__path__, "cloze."))
    return [
        name
        for name in names
        if not name.startswith(WITHOUT)
        and not name.endswith("__main__")
        and name.startswith(LARGE) == large
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("large", "among"), [(False, "cloze.service.server.process"), (True, "cloze.export.train.loop")]
)
def test_every_module_is_imported(large: bool, among: str) -> None:
    names = modules(large=large)
    assert among in names
    run(f"{BEGIN} from importlib import import_module; [*map(import_module, {names})]")


@pytest.mark.parametrize("platform", [pytest.param("darwin", marks=pytest.mark.slow), "win32"])
def test_one_process_answers(tiny_store: Path, platform: str) -> None:
    command = (sys.executable, "-c", COMMAND.replace("win32", platform), "serve")
    with running_server(tiny_store, "--model", "bert", command=command, **ENVIRONMENT) as server:
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "the king"}).raise_for_status()
        assert len(answer.json()[0]) > 1
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "cloze_memory_limit_bytes" in metrics
        assert server.stop() == 0
    log = "".join(server.log)
    assert "draining" in log
    assert "Traceback" not in log


def test_several_processes_are_refused_with_the_settings_to_change(tiny_store: Path) -> None:
    arguments = ("serve", "--model-store", str(tiny_store), "--frontends", "2")
    message = run(COMMAND, *arguments, status=2)
    assert "processes cannot share a port: set frontends to 0 and gpus to 1" in message


def test_commands_read_and_write_text_of_any_language(tiny_store: Path, tmp_path: Path) -> None:
    store = ("--model-store", str(tiny_store))
    assert "cores for this process" in run(COMMAND, "doctor", *store)
    (tmp_path / "in.jsonl").write_text('{"text": "the king of Århus"}\n', encoding="utf-8")
    bulk = ("bulk", "embed", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"))
    run(COMMAND, *bulk, "--model", "bert", CLOZE_MODEL_STORE=str(tiny_store))
    assert [file.name for file in (tmp_path / "out").glob("part-*")]
    keys = tmp_path / "keys"
    keys.write_text("# of the office in Århus\n", encoding="utf-8")
    run(COMMAND, "keys", "add", "one", "--file", str(keys))
    run(COMMAND, "keys", "add", "two", "--file", str(keys))
    assert "[one]" in keys.read_text()
    assert "[two]" in keys.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "left_out"),
    [("darwin", ("lab/",)), ("win32", ("lab/", "service/cloze/service/processes/"))],
)
def test_types_of_other_systems_have_what_is_used(
    platform: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    """Python's types name what each system has."""
    mypy = ("-m", "mypy", "--platform", platform, "--cache-dir", str(tmp_path))
    done = call(sys.executable, *mypy, check=False)
    problems = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line for line in problems if not line.startswith(left_out)] == []
    assert done.stdout.splitlines()[-1].startswith(("Success", "Found")), done.stderr


@pytest.mark.slow
def test_a_checkpoint_is_exported_once_and_served(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    run(COMMAND, "export", str(checkpoints["bert"]), "--name", "bert", "--model-store", str(store))
    assert "ok" in run(COMMAND, "store", "verify", "bert", "--model-store", str(store))
    command = (sys.executable, "-c", COMMAND, "serve")
    model = str(checkpoints["distilbert"])
    with running_server(store, "--model", model, command=command, **ENVIRONMENT) as server:
        httpx.post(f"{server.url}/embed", json={"inputs": "the king"}).raise_for_status()
    assert (store / ".lock").exists()
