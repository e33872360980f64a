"""`cloze doctor`, and results as a table on a terminal, as plain columns in a pipe, as JSON."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from cloze.cli import cli
from cloze.service import machine
from cloze.tables import print_rows
from tests.support.serving import bare_environment, running_server

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


@pytest.mark.parametrize(
    ("flags", "processor", "precision"),
    [
        ("avx512_vnni", ", avx512_vnni", "int8 on a CPU, which is faster than fp32 by avx512_vnni"),
        ("avx2", "", "int8 on a CPU, which is faster than fp32 by avx2"),
        ("sse2", "", "fp32 on a CPU: int8 would not be faster"),
    ],
)
def test_a_finding_is_one_sentence(
    flags: str, processor: str, precision: str, tiny_store: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "cpuinfo").write_text(f"model name : Chip\nflags : {flags}\n")
    monkeypatch.setattr("cloze.model_store.processor.CPU_INFO", tmp_path / "cpuinfo")
    done = CliRunner().invoke(cli, ["doctor", "--model-store", str(tiny_store)])
    lines = {line[4:].partition("  ")[0]: line for line in done.stdout.splitlines()}
    assert re.search(rf"  Chip, \d+ cores for this process{processor}$", lines["processor"])
    export = "; export with --precision int8, so that bundles have it" * ("int8 on" in precision)
    assert lines["precision"].endswith(f"  auto takes {precision}{export}")


def test_an_empty_store_is_a_problem_with_advice(tmp_path: Path) -> None:
    found = findings("--model-store", str(tmp_path), code=1)
    assert found["store"]["status"] == "problem"
    assert found["store"]["advice"].startswith("cloze export SOURCE")


def test_missing_packages_are_named_with_the_command_that_installs_them(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("onnxruntime", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    found = findings("--model-store", str(tiny_store), code=1)
    assert found["onnxruntime"]["status"] == "problem"
    assert "matplotlib" in found["train"]["finding"]
    for subject in ("onnxruntime", "train"):
        assert "pip install" in found[subject]["advice"]


def test_the_limit_of_the_container_counts(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: 600_000_000)
    monkeypatch.setattr(machine, "memory_used", lambda: 400_000_000)
    found = findings("--model-store", str(tiny_store))["memory"]
    assert (found["status"], found["finding"].split(" available")[0]) == ("note", "200 MB")


def test_little_memory_and_a_misspelt_variable_are_noted(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.memory_limit, "__defaults__", (tmp_path,))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=300_000_000))
    monkeypatch.setenv("CLOZE_PORTT", "1")
    found = findings("--model-store", str(tiny_store))
    assert (found["memory"]["status"], found["memory"]["finding"]) == ("note", "300 MB available")
    assert found["settings"]["finding"] == "CLOZE_PORTT is not a setting"


def test_a_wrong_setting_is_a_problem(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOZE_WORKERS", "many")
    found = findings("--model-store", str(tiny_store), code=1)
    assert found["settings"]["finding"].startswith("CLOZE_WORKERS: ")


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


ROWS = [{"score": 0.25, "token": "[red]"}, {"score": 0.125, "token": "a\nb"}]


def test_plain_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(ROWS, right=("score",), headings=True)
    assert capsys.readouterr().out == " score  token\n0.2500  [red]\n0.1250  a b\n"


def test_json_has_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(ROWS, as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == ROWS


def on_a_terminal(program: str, **environment: str) -> str:
    main, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=terminal, check=True, env=bare_environment(TERM="xterm", **environment),
    )  # fmt: skip
    os.close(terminal)
    shown = os.read(main, 16_384).decode()
    os.close(main)
    assert done.returncode == 0
    return shown


def test_a_terminal_gets_a_table_with_the_texts_as_they_are() -> None:
    """Square brackets are no markup, so [MASK] is not lost."""
    program = f"from cloze.tables import print_rows; print_rows({ROWS!r}, right=('score',))"
    shown = on_a_terminal(program)
    assert "[red]" in shown
    assert "──" in shown
    assert "\x1b[1m" in shown
    assert "\x1b[" not in on_a_terminal(program, NO_COLOR="1")
