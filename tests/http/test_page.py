"""The page at /, in a real browser: every panel, errors, and what it asks."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloze.export.publish import export
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from tests.support import family_checkpoints, gliner
from tests.support.command import cloze_here
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
    return lambda scenario, *given: printed([*command, scenario, *(given or [server.url])])


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
    assert panels["tabs in rows"] == [11]
    assert panels["plots in rows"] == [2, 2]
    models = httpx.get(f"{server.url}/info").json()["models"]
    assert panels["choices"] == next(m["label_sets"] for m in models if "label_sets" in m)
    assert {legend for legend, is_drawn in panels["idle"].items() if not is_drawn} == {
        f"{name} \u2013" for name in ("p50", "p99", "texts")
    }


def test_numbers_keep_their_units_and_fields_without_a_use_are_hidden(
    panels: dict[str, Any],
) -> None:
    """A line may end before a number, not after it. A tagger has labels of its own."""
    for panel, text in panels["text"].items():
        assert re.findall(r"\d (%|ms)", text) == []
        assert ("\u00a0%" in text) == (panel not in ("embed", "redact", "live")), panel
    assert "Labels, one per line" not in panels["text"]["redact"]
    assert "Labels, one per line" in panels["text"]["zero-shot-classification"]


def test_the_keyboard_goes_on_in_the_chosen_panel(browse: Browse) -> None:
    fields = ["Text", "Does this text follow?", "Model", "Ask"]
    assert browse("keyboard") == [*fields, "Copy curl", "Copy Python"]


def test_the_documentation_of_the_api_is_dark_and_fits_a_phone(browse: Browse) -> None:
    seen = browse("api")
    assert max(map(int, re.findall(r"\d+", seen.pop("background")))) < 80
    assert seen == {"servers": 0, "wide": False, "messages": []}


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


def test_a_server_with_keys_is_tried_with_a_key(browse: Browse, tmp_path: Path) -> None:
    """The page asks for the key, never shows it, and says what the key does not allow."""
    file = tmp_path / "keys.toml"
    key = cloze_here("keys", "add", "guest", "--file", str(file)).stdout.strip()
    with running_server(DEFAULT_ROOT, "--keys-file", str(file), "--model", "cloze-bert") as server:
        seen = browse("with_key", server.url, key)
    assert seen["before"].split("\n") == ["Key of this server", "Use the key"]
    assert seen["violations"] == []
    assert seen["wrong"].startswith("401: ")
    assert "Answer" in seen["right"]
    assert "/fill-mask -H 'authorization: Bearer KEY' -d '" in seen["right"]
    assert 'headers={"authorization": "Bearer KEY"}) as client:' in seen["right"]
    assert key not in seen["right"]
    assert seen["live"].startswith("403: ")
    assert all("status of 40" in message for message in seen["messages"])


def test_panels_send_what_other_models_need(browse: Browse, tmp_path: Path) -> None:
    """A model of any labels needs labels, and a RoBERTa its own mask."""
    store = Store(tmp_path / "store")
    gliner.export_kind("span", store)
    family_checkpoints.save("roberta", "masked_lm", tmp_path / "roberta")
    export(str(tmp_path / "roberta"), "roberta", store)
    with running_server(tmp_path / "store") as server:
        seen = browse("other_models", server.url)
    sent = dict.fromkeys(("entities", "redact"), '"labels":["person","city"]')
    for panel, part in (sent | {"fill-mask": '"She opened the <mask> and went in."'}).items():
        text = seen["text"][panel]
        assert "Answer" in text
        assert part in text
    assert "Labels, one per line" in seen["text"]["redact"]
    assert "Text with one or more <mask>" in seen["text"]["fill-mask"]
    assert seen["messages"] == []
