"""Examples of the README, of Start and of the clients' page run, with the project's models."""

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.support.command import cloze
from tests.support.faulty import assert_close
from tests.support.serving import Server, running_server


@pytest.fixture(scope="module")
def default_server() -> Iterator[Server]:
    """As ``make serve``, but without bundles that a developer added, and in fp32 everywhere."""
    models = ",".join(sorted(folder.name for folder in DEFAULT_ROOT.glob("cloze-*")))
    with running_server(DEFAULT_ROOT, "--precision", "fp32", CLOZE_MODEL=models) as server:
        yield server


ROOT = Path(__file__).parents[2]
TEXT = "".join((ROOT / page).read_text() for page in ("README.md", "docs/start.md"))
EXAMPLES = re.findall(
    r"^    curl localhost:8000(/\S+) -d '(.*)'\n\n((?:    .*\n)+)", TEXT, re.MULTILINE
)


@pytest.mark.parametrize(
    ("route", "body", "answer"), EXAMPLES, ids=[route for route, _, _ in EXAMPLES]
)
def test_the_answers(default_server: Server, route: str, body: str, answer: str) -> None:
    actual = httpx.post(default_server.url + route, content=body).raise_for_status().json()
    if route == "/embed":
        first, last = answer.strip().strip("[]").split(", ... ,")
        expected: list[Any] = [*json.loads(f"[{first}]"), *json.loads(f"[{last}]")]
        actual = [*actual[0][:3], actual[0][-1]]
    else:
        expected = json.loads(answer)
    assert_close(actual, expected, 1e-4)


def test_every_command_that_they_name_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\S+)$", TEXT, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


CLIENTS = (ROOT / "docs" / "clients.md").read_text()
PROGRAMS = re.findall(
    r"^## (.+)$(?:(?!^## )[\s\S])*?^```python\n([\s\S]*?)^```", CLIENTS, re.MULTILINE
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
    commands = re.findall(r"^    cloze ask (\S+) (.+)$", CLIENTS, re.MULTILINE)
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
