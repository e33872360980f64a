"""Results as a table on a terminal, as plain columns in a pipe, as JSON."""

import json
import os
import pty
import subprocess
import sys

import pytest

from cloze.tables import print_rows

ROWS = [{"score": 0.25, "token": "[red]"}, {"score": 0.125, "token": "a\nb"}]


def test_plain_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(ROWS, right=("score",), headings=True)
    assert capsys.readouterr().out == " score  token\n0.2500  [red]\n0.1250  a b\n"


def test_json_has_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(ROWS, as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == ROWS


def test_a_terminal_gets_a_table_with_the_texts_as_they_are() -> None:
    """Square brackets are no markup, so [MASK] is not lost."""
    main, terminal = pty.openpty()
    program = f"from cloze.tables import print_rows; print_rows({ROWS!r}, right=('score',))"
    done = subprocess.run([sys.executable, "-c", program], stdout=terminal, check=True)
    os.close(terminal)
    shown = os.read(main, 4096).decode()
    os.close(main)
    assert done.returncode == 0
    assert "[red]" in shown
    assert "──" in shown
