"""The README's requests, sent to the models that come with the project, give the README's answers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.http.test_answers import assert_alike
from tests.support.serving import Server, running_server

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(
    r"^    curl localhost:8000(/\S+) -d '(.*)'\n\n((?:    .*\n)+)", README, re.MULTILINE
)


@pytest.fixture(scope="module")
def default_server() -> Iterator[Server]:
    """As ``make serve``, but for bundles that a developer added, and in fp32 whatever the
    processor.
    """
    models = ",".join(sorted(folder.name for folder in DEFAULT_ROOT.glob("cloze-*")))
    with running_server(DEFAULT_ROOT, "--precision", "fp32", CLOZE_MODEL=models) as server:
        yield server


def test_there_is_an_example_of_each_task() -> None:
    assert [route for route, _, _ in EXAMPLES] == [
        "/embed",
        "/fill-mask",
        "/nsp",
        "/qa",
        "/classify",
        "/token-classification",
        "/zero-shot-classification",
    ]


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
    assert_alike(actual, expected)


def test_every_command_it_names_exists() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in re.findall(r"^    make (\S+)$", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for link in re.findall(r"\]\((docs/[^)#]+)", README):
        assert (Path(__file__).parents[2] / link).exists(), link
