"""Results as a table on a terminal, as plain columns in a pipe, as JSON."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

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


BARS = {
    "client": """
from cloze.client.clients import _Options
for _ in _Options(batch_size=1, retries=0, progress=True).shown(range(40), 40): pass
""",
    "bulk": """
from cloze.bulk_command import _watcher
with _watcher(shown=True) as watcher:
    watcher.on_plan(40, 20)
    watcher.on_rows(20)
""",
}


@pytest.mark.parametrize("name", BARS)
def test_a_progress_bar_is_as_wide_as_the_terminal(name: str) -> None:
    """Of 120 columns, the bar itself has at least 70."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    variables = {n: v for n, v in os.environ.items() if n not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-c", BARS[name]]
    subprocess.run(command, stderr=terminal, env=variables | {"TERM": "xterm"}, check=True)
    os.close(terminal)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(main, 65536).decode())
    os.close(main)
    last = next(line for line in reversed(re.split(r"[\r\n]+", shown)) if "40/40" in line)
    assert len(last) <= 120
    assert max(map(len, re.findall(r"[━█]+", last))) >= 70, last
