"""Results as a table on a terminal, as plain columns in a pipe, as JSON."""

import json
import os
import pty
import subprocess
import sys

import pytest

from cloze.tables import print_rows
from tests.support.serving import bare_environment

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
