"""The README's requests, sent, give the README's answers."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import Server, running_server
from tests.test_answers import assert_alike

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"^    curl localhost:8000(/\S+) -d '(.*)'\n\n((?:    .*\n)+)", README, re.MULTILINE)


def test_there_is_an_example_of_each_task() -> None:
    assert [route for route, _, _ in EXAMPLES] == ["/embed", "/fill-mask", "/nsp", "/qa"]


@pytest.mark.parametrize(("route", "body", "answer"), EXAMPLES[1:], ids=[route for route, _, _ in EXAMPLES[1:]])
def test_the_tiny_models_answers(server: Server, route: str, body: str, answer: str) -> None:
    assert_alike(httpx.post(server.url + route, content=body).json(), json.loads(answer))


def test_the_real_models_answer(minilm_store: Path) -> None:
    _, body, answer = EXAMPLES[0]
    first, last = answer.strip().strip("[]").split(", ... ,")
    expected: list[Any] = [*json.loads(f"[{first}]"), *json.loads(f"[{last}]")]
    with running_server(minilm_store) as server:
        vector = httpx.post(f"{server.url}/embed", content=body).json()[0]
    assert_alike([*vector[:3], vector[-1]], expected)


def test_every_command_it_names_exists() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in re.findall(r"^    make (\S+)$", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for link in re.findall(r"\]\((docs/[^)]+)\)", README):
        assert (Path(__file__).parents[1] / link).exists(), link
