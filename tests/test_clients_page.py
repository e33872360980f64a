"""The examples of docs/clients.md run, against the models that come with the project."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.serving import Server, running_server
from tests.test_client import cloze_ask

PAGE = (Path(__file__).parents[1] / "docs" / "clients.md").read_text()
PROGRAMS = re.findall(
    r"^## (.+)$(?:(?!^## )[\s\S])*?^```python\n([\s\S]*?)^```", PAGE, re.MULTILINE
)

EXPECTED = {
    "Cloze's own": "(2, 256) ['door', 'chair']\nTrue The king was dead\n422 422: inputs[0] holds no mask token",
    "huggingface_hub": "door\n(1, 256)\n[0.9",
    "openai": "256 ['cloze-bert",
}


@pytest.fixture(scope="module")
def default_server() -> Iterator[Server]:
    models = ",".join(sorted(folder.name for folder in DEFAULT_ROOT.glob("cloze-*")))
    with running_server(DEFAULT_ROOT, "--precision", "fp32", CLOZE_MODEL=models) as server:
        yield server


def test_every_program_is_checked() -> None:
    assert [title for title, _ in PROGRAMS] == list(EXPECTED)


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
        done = cloze_ask(task, *texts, "--url", default_server.url)
        assert done.returncode == 0, done.stderr


def test_every_route_is_on_a_page(default_server: Server) -> None:
    pages = PAGE + (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    for path in httpx.get(f"{default_server.url}/openapi.json").json()["paths"]:
        assert f"`{path}`" in pages or f"POST {path}" in pages or f"GET {path}" in pages, path
