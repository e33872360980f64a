"""The documentation site: it builds without a warning, and is read and searched from files."""

import html
import json
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support.command import call
from tests.support.released_clients import CLIENTS, environment, printed

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"

SEARCHED = {
    "nginx": "Below a path prefix, behind nginx or another proxy",
    "path prefix": "Below a path prefix, behind nginx or another proxy",
    "ollama": "Ollama's clients",
    "limit memory": "Limit memory",
    "load generator": "What a load generator sees",
}
"""Words that a newcomer searches for, and the title of the section that has the answer."""


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the site; any warning of the builder is an error."""
    done = call(sys.executable, "scripts/build-site", cwd=ROOT)
    assert "No issues found" in done.stdout + done.stderr
    return SITE


def test_every_link_of_a_page_leads_to_a_file_of_the_site(site: Path) -> None:
    """And no page loads anything from elsewhere."""
    broken = []
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 40
    for page in pages:
        text = page.read_text()
        for link in re.findall(r'<a[^>]+href="([^"#]+)', text):
            if not re.match(r"https?:|mailto:", link):
                target = page.parent / unquote(html.unescape(link))
                if not target.is_file():
                    broken.append(f"{page.relative_to(site)}: {link}")
        for kind, address in re.findall(r'<(script|img|link)[^>]+(?:src|href)="([^"]+)', text):
            if kind != "link" and address.startswith("data:"):
                continue
            if re.match(r"(https?:)?//", address) or not (
                (page.parent / unquote(address.split("#")[0].split("?")[0])).is_file()
            ):
                broken.append(f"{page.relative_to(site)}: {kind} {address}")
    assert broken == []


@pytest.mark.slow
def test_the_site_is_read_and_searched_from_files(site: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed (Debian's package chromium)")
    python = environment("page.txt", tmp_path / "environment") / "python"
    program = [
        str(python),
        str(CLIENTS / "site.py"),
        chromium,
        str(site),
        "fair queueing",
        "Order of work",
        *SEARCHED,
    ]
    seen = printed(program)
    assert seen["schemes"] == ["file"], "the page asked for something on the network"
    assert seen["messages"] == []
    assert "Order of work" in seen["found"]
    assert seen["opened"].startswith("2. Order of work"), json.dumps(seen)
    assert seen["names"] > 40
    for words, title in SEARCHED.items():
        assert any(title in result for result in seen["results"][words]), seen["results"][words]
    assert (seen["broken"], seen["overflow"]) == ([], False), "on a phone"
