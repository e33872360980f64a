"""The recipes of docs/clients.md: what databases and tools post on their first call, and read.

A line of `recipes.txt` names the client, the address that its user configures, what it appends to
that, its body, and the answer. The bodies follow the public documentation of each API. The page names
the address of each line, so a recipe without a test, or a test without a recipe, fails.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import check_table
from tests.support.route_service import Service

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
SECTION = PAGE.partition("\n## Databases, clouds and tools\n")[2].partition("\n## ")[0]
RECIPES = dict(re.findall(r"^### (.+)\n([\s\S]+?)(?=^### |\Z)", SECTION, re.MULTILINE))
RUN = {"Java", "Semantic Kernel", "LiteLLM", "Qdrant", "Chroma"}
"""Recipes whose released packages run in tests/system/test_recipes.py."""

CALLS = Path(__file__).with_name("recipes.txt")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("models"), [{"name": "tiny"}]) as service:
        yield service


def rounded(number: str) -> float:
    return round(float(number), 4)


def test_a_client_reads_its_first_answer(service: Service) -> None:
    def outcome(_: str, request: str) -> str:
        address, path, body = eval(request)
        response = service.post(address.removeprefix("http://localhost:8000") + path, body)
        answer: Any = json.loads(response.text, parse_float=rounded)
        if isinstance(answer, dict):
            for name in {"id", "created", "total_duration"} & answer.keys():
                del answer[name]  # each answer has its own
        return f"{response.status_code} {json.dumps(answer)}"

    check_table(CALLS, outcome)


def test_every_recipe_has_its_address_and_a_test() -> None:
    calls = [line.split(" | ") for line in CALLS.read_text().splitlines()]
    assert {client for client, *_ in calls} | RUN == RECIPES.keys()
    for client, request, _ in calls:
        assert eval(request)[0] in RECIPES[client], request
