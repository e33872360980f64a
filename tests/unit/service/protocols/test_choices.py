"""How an error shows a wrong choice: `tests/http/test_parameters.py` has every field."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.route_service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("bundle")) as made:
        yield made


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (7, "7"),
        (True, "true"),
        (["x"], "an array"),
        ({"x": "y"}, "an object"),
        ("\u00fcP\n", "'\\xfcP\\n'"),
        ("Neither<1>", "'Neither<1>'"),
    ],
)
def test_a_wrong_choice_is_shown_with_the_choices(service: Service, value: Any, shown: str) -> None:
    answer = service.post("/classify", {"inputs": "a", "parameters": {"long_text": value}})
    assert answer.status_code == 422
    assert answer.json()["error"].endswith(f"'truncate' or 'window', got {shown}")


def test_a_long_choice_is_cut(service: Service) -> None:
    body = {"inputs": "a", "truncation_direction": "Neither" * 10_000}
    answer = service.post("/embed", body)
    assert "'NeitherNeither" in answer.text
    assert len(answer.text) < 800
