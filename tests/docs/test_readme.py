"""The requests of the README and of Start, sent to the models of the project, give their answers."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.faulty import assert_close
from tests.support.serving import Server

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
