"""The page at /, in a real browser: every panel, errors, and what it asks."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.support.released_clients import CLIENTS, environment, printed
from tests.support.serving import Server, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Browse = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The default models, which serve every panel."""
    with running_server(DEFAULT_ROOT) as server:
        yield server


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Browse:
    """Return a function that runs a scenario of tests/clients/page.py."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed (Debian's package chromium)")
    python = environment("page.txt", tmp_path_factory.mktemp("browser") / "environment") / "python"

    def run(scenario: str, address: str) -> dict[str, Any]:
        return printed([str(python), str(CLIENTS / "page.py"), chromium, scenario, address])

    return run


@pytest.fixture(scope="module")
def panels(browse: Browse, server: Server) -> dict[str, Any]:
    return browse("panels", server.url)


def test_every_panel_answers(panels: dict[str, Any]) -> None:
    assert len(panels["text"]) == 10
    for text in (panels["text"][panel] for panel in panels["text"].keys() - {"live"}):
        assert "Answer" in text
        assert "ms in the browser. In the server: tokenizing" in text
        assert "curl http" in text
        assert "from cloze.client import Client" in text


def test_the_page_is_accessible(panels: dict[str, Any]) -> None:
    """axe-core's rules, in light and dark; and nothing is wider than a phone."""
    assert panels["violations"] == []
    assert panels["rules"] > 15, "that many rules applied to each panel"
    assert panels["wide"] == []


def test_the_page_asks_only_this_server_and_logs_nothing(
    panels: dict[str, Any], server: Server
) -> None:
    assert panels["messages"] == []
    assert len(panels["addresses"]) >= 10
    others = [a for a in panels["addresses"] if not a.startswith((server.url, "data:", "about:"))]
    assert others == []
    policy = httpx.get(server.url).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy


def test_answers_are_those_of_the_routes(browse: Browse, server: Server) -> None:
    seen = browse("answers", server.url)
    assert seen["messages"] == []
    # The shown commands repeat the requests.
    done = subprocess.run(seen["curl"], shell=True, capture_output=True, text=True)
    assert [p["token_str"] for p in json.loads(done.stdout)] == seen["bars"]
    assert '"model":"cloze-distilbert@1"' in seen["curl of another model"]
    done = subprocess.run([sys.executable, "-c", seen["python"]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Prediction(") == 2
    assert len(seen["cosines"]) == 9
    assert seen["cosines"][0::4] == ["1.000"] * 3
    assert seen["marked"] == seen["answers"][:2]
    assert seen["emoji"][0] == seen["emoji"][1], "offsets are in code points"
    assert "".join(seen["tokens"]) == "Heopenedthedoorandwalkedintothesky."


def test_entities_and_classes(browse: Browse, server: Server) -> None:
    seen = browse("labels", server.url)
    assert seen["messages"] == []
    for shown, expected in zip(seen["entities"], ("Ada LovelacePER ", "LondonLOC "), strict=True):
        assert shown.startswith(expected)
    assert (seen["classes"][0], len(seen["classes"])) == ("negative", 3)
    parameters = {"label_set": "intents", "top_k": 2}
    body = {"inputs": "Book a table for two at eight.", "parameters": parameters}
    [labels] = httpx.post(f"{server.url}/classify", json=body).json()
    assert seen["intents"] == [each["label"] for each in labels]
    assert len(seen["own labels"]) == 2
    # The shown commands repeat the request.
    for command in (seen["code"][0], [sys.executable, "-c", seen["code"][1]]):
        done = subprocess.run(
            command, shell=isinstance(command, str), capture_output=True, text=True, check=True
        )
        assert seen["intents"][0] in done.stdout


def test_mistakes_are_told_and_texts_are_no_markup(browse: Browse, server: Server) -> None:
    seen = browse("mistakes", server.url)
    assert seen["alert"].startswith("422: inputs holds no mask token")
    assert seen["images"] == 0
    assert [m for m in seen["messages"] if "422" not in m] == []  # Chromium logs each failed fetch


def test_the_docs_try_a_route_out_without_the_network(browse: Browse, server: Server) -> None:
    seen = browse("docs", server.url)
    assert seen["status"].split()[0] == "200"
    assert json.loads(seen["body"])[0]["token_str"]
    assert [a for a in seen["addresses"] if not a.startswith((server.url, "data:"))] == []
    assert seen["messages"] == []
