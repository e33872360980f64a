"""`cloze doctor` and the tables of results."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from cloze import doctor
from cloze.cli import cli
from cloze.service import machine
from tests.support.serving import running_server

pytestmark = pytest.mark.usefixtures("no_variables")


def findings(*arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(cli, ["doctor", "--json", *arguments])
    assert done.exit_code == code, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["subject"]: row for row in rows}


def test_a_machine_that_serves_has_no_problem(tiny_store: Path) -> None:
    found = findings("--model-store", str(tiny_store))
    assert {"cloze", "processor", "precision", "onnxruntime", "GPU", "store", "memory"} <= set(
        found
    )
    assert "bert@1" in found["store"]["finding"]
    assert {row["status"] for row in found.values()} <= {"ok", "note"}


def test_an_empty_store_is_a_problem_with_advice(tmp_path: Path) -> None:
    found = findings("--model-store", str(tmp_path), code=1)
    assert found["store"]["status"] == "problem"
    assert found["store"]["advice"].startswith("cloze export SOURCE")


def test_a_server_that_exports_its_model_needs_no_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOZE_MODEL", "hub:a/b")
    assert findings("--model-store", str(tmp_path))["store"]["status"] == "note"


def test_a_broken_bundle_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "1" / "manifest.json").write_text("{}")
    done = CliRunner().invoke(cli, ["doctor", "--json", "--model-store", str(tmp_path)])
    assert done.exit_code == 1
    problems = [json.loads(line) for line in done.stdout.splitlines() if '"problem"' in line]
    assert any("bad" in problem["finding"] for problem in problems)


def test_a_missing_runtime_is_a_problem(tiny_store: Path) -> None:
    program = (
        "import sys; sys.modules['onnxruntime'] = None; from cloze.cli import main; "
        f"main(['doctor', '--model-store', {str(tiny_store)!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert "onnxruntime" in line
    assert "pip install" in line


def test_a_gpu_without_cuda_is_noted(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_GPU", tmp_path)
    found = findings("--model-store", str(tiny_store))
    assert found["GPU"]["status"] == "note"
    assert "[gpu]" in found["GPU"]["advice"]


def test_little_memory_and_a_misspelt_variable_are_noted(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.memory_limit, "__defaults__", (tmp_path,))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=300_000_000))
    monkeypatch.setenv("CLOZE_PORTT", "1")
    found = findings("--model-store", str(tiny_store))
    assert (found["memory"]["status"], found["memory"]["finding"]) == ("note", "300 MB available")
    assert found["settings"]["finding"] == "CLOZE_PORTT is not a setting"


def test_the_limit_of_the_container_counts(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("600000000")
    (tmp_path / "memory.current").write_text("400000000")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    for read in (machine.memory_limit, machine.memory_used):
        monkeypatch.setattr(read, "__defaults__", (tmp_path,))
    found = findings("--model-store", str(tiny_store))["memory"]
    assert found["finding"] == "200 MB available of the 600 MB that the container may use"
    assert found["status"] == "note"


def test_a_wrong_setting_is_a_problem(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOZE_WORKERS", "many")
    found = findings("--model-store", str(tiny_store), code=1)
    assert found["settings"]["finding"].startswith("CLOZE_WORKERS: ")


# ---- tables --------------------------------------------------------------------------------------


def test_a_listed_bundle_has_its_values_as_json(tiny_store: Path) -> None:
    done = CliRunner().invoke(cli, ["store", "list", "--json", "--model-store", str(tiny_store)])
    rows = {row["bundle"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows.keys() == {"bert@1", "bert-qa@1", "distilbert@1"}
    assert rows["bert-qa@1"]["tasks"] == ["qa"]
    assert rows["bert@1"]["precisions"] == ["fp32"]
    assert rows["bert@1"]["bytes"] > 100_000


def test_shell_completion_knows_the_commands() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("cloze"))],
        env=os.environ
        | {"_CLOZE_COMPLETE": "bash_complete", "COMP_WORDS": "cloze do", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "plain,doctor"


@pytest.mark.parametrize(
    "command",
    [
        ["doctor"],
        ["bulk", "embed", "{home}/../texts.jsonl", "--output", "{home}/../out", "--model", "bert"],
        ["export", "{bert}", "--name", "bert", "--model-store", "{home}/../new"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_no_command_writes_to_the_home_folder(
    tiny_store: Path, checkpoints: dict[str, Path], tmp_path: Path, command: list[str]
) -> None:
    """Onnxruntime's telemetry keeps an identity under HOME as soon as it is imported."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "texts.jsonl").write_text('{"text": "the king"}\n')
    environment = {**os.environ, "HOME": str(home), "CLOZE_MODEL_STORE": str(tiny_store)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)  # this process has imported the package
    arguments = [word.format(home=home, bert=checkpoints["bert"]) for word in command]
    done = subprocess.run(
        [sys.executable, "-m", "cloze", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(home.rglob("*")) == []


def test_a_server_writes_nothing_to_the_home_folder(tiny_store: Path, tmp_path: Path) -> None:
    with running_server(tiny_store, "--model", "bert", HOME=str(tmp_path)) as server:
        httpx.post(f"{server.url}/embed", json={"inputs": "the king"}).raise_for_status()
    assert list(tmp_path.rglob("*")) == []


def test_telemetry_is_off_before_any_module_imports_the_runtime(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", "import cloze.model_store, onnxruntime"],
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        check=True,
    )
    assert list(tmp_path.rglob("*")) == []
