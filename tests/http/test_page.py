"""The page at /, in a real browser: every panel, errors, and what it asks."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from tests.support import gliner
from tests.support.released_clients import CLIENTS, environment, printed
from tests.support.serving import Server, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Browse = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The default models, which serve every panel."""
    with running_server(DEFAULT_ROOT) as server:
        yield server


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Browse:
    """Return a function that runs a scenario of tests/clients/page.py, by default at the server."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed (Debian's package chromium)")
    python = environment("page.txt", tmp_path_factory.mktemp("browser") / "environment") / "python"
    command = [str(python), str(CLIENTS / "page.py"), chromium]
    return lambda scenario, url=server.url: printed([*command, scenario, url])


@pytest.fixture(scope="module")
def panels(browse: Browse) -> dict[str, Any]:
    return browse("panels")


def test_every_panel_answers(panels: dict[str, Any]) -> None:
    assert len(panels["text"]) == 10
    for text in (panels["text"][panel] for panel in panels["text"].keys() - {"live"}):
        assert "Answer" in text
        assert "ms in the browser. In the server: tokenizing" in text
        assert "curl http" in text
        assert "from cloze.client import Client" in text


def test_tabs_sets_and_idle_plots(panels: dict[str, Any], server: Server) -> None:
    """Tabs share a row, label sets are a list, and there is no latency without a request."""
    assert panels["rows of tabs"] == 1
    models = httpx.get(f"{server.url}/info").json()["models"]
    assert panels["choices"] == next(m["label_sets"] for m in models if "label_sets" in m)
    assert {f"{name} \u2013" for name in ("p50", "p99", "texts")} <= {*panels["idle"]}


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
    policy = httpx.get(server.url, headers={"accept": "text/html"}).headers[
        "content-security-policy"
    ]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy


def test_mistakes_are_told_and_texts_are_no_markup(browse: Browse) -> None:
    seen = browse("mistakes")
    assert seen["alert"].startswith("422: inputs holds no mask token")
    assert seen["images"] == 0
    assert [m for m in seen["messages"] if "422" not in m] == []  # Chromium logs each failed fetch


def test_a_model_of_any_labels_redacts(browse: Browse, tmp_path: Path) -> None:
    """Its panel sends the labels that such a model needs."""
    gliner.export_kind("span", Store(tmp_path))
    with running_server(tmp_path) as server:
        seen = browse("entities", server.url)
    for text in seen["text"].values():
        assert "Answer" in text
        assert '"labels":["person","city"]' in text
    assert seen["messages"] == []
