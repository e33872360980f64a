"""The examples of docs/clients.md run, against the models that come with the project."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.support.command import cloze
from tests.support.serving import Server

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text()
PROGRAMS = re.findall(
    r"^## (.+)$(?:(?!^## )[\s\S])*?^```python\n([\s\S]*?)^```", PAGE, re.MULTILINE
)

EXPECTED = {
    "Python client of Cloze": "(2, 384) ['door', 'room']\nTrue Hamburg\n422: inputs[0] holds no mask",
    "huggingface_hub": "door\n(1, 384)\n[0.8",
    "openai": "384 ['cloze-bert",
}


@pytest.mark.parametrize(("title", "program"), PROGRAMS, ids=[title for title, _ in PROGRAMS])
def test_the_programs(default_server: Server, title: str, program: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program.replace("http://localhost:8000", default_server.url), {})
    assert printed.getvalue().startswith(EXPECTED[title])


def test_the_commands(default_server: Server) -> None:
    commands = re.findall(r"^    cloze ask (\S+) (.+)$", PAGE, re.MULTILINE)
    assert commands
    for task, rest in commands:
        texts = re.findall(r'"([^"]+)"', rest)
        done = cloze("ask", task, *texts, "--url", default_server.url)
        assert done.returncode == 0, done.stderr


def test_the_api_page_has_every_route() -> None:
    page = (ROOT / "docs/api.md").read_text()
    routes = re.findall(
        r"^\| `([A-Z]+ /.*?)` \|", (ROOT / "docs/routes.md").read_text(), re.MULTILINE
    )
    assert len(routes) > 20
    assert [route for route in routes if route not in page] == []
