"""The documentation site: it builds without a warning, and is read and searched from files."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from cloze.model_store.manifest import SCHEMA_VERSION
from tests.system.test_released_clients import CLIENTS, environment, printed

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the site; any warning of the builder is an error."""
    done = subprocess.run(
        [sys.executable, "scripts/build-site"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    return SITE


# What users type -> the section that answers, which must be among the first three results.
QUESTIONS = {
    "serve my own model": "index.html#your-own-model",
    "several models": "docs/questions.html#how-do-i-serve-several-models",
    "number of threads": "docs/questions.html#how-do-i-set-the-number-of-threads",
    "batch size": "docs/questions.html#how-do-i-set-the-batch-size",
    "environment variables": "docs/questions.html#how-do-i-change-a-setting",
    "timeout": "docs/questions.html#how-do-i-change-a-timeout",
    "rate limit": "docs/questions.html#is-there-a-rate-limit",
    "error 429": "docs/api.html#errors",
    "memory": "docs/questions.html#how-much-memory-does-a-server-need",
    "offline": "docs/questions.html#does-the-server-work-offline",
    "proxy": "docs/questions.html#how-do-i-run-behind-a-proxy",
    "license": "index.html#license",
    "upgrade": "docs/upgrading.html",
    "roll back": "docs/upgrading.html#roll-back",
    "api key": "docs/security.html#api-keys",
    "https": "docs/security.html#tls-https",
    "docker": "docs/deployment.html#docker-images",
    "kubernetes": "docs/deployment.html#kubernetes",
    "gpu": "docs/deployment.html#gpus-and-several-processes",
    "how many pods": "docs/scale.html#how-many-pods-for-n-requests-per-second",
    "load balancer": "docs/scale.html#a-load-balancer",
    "metrics": "docs/api.html#metrics",
    "prometheus": "docs/monitoring.html",
    "alerts": "docs/monitoring.html#alerts",
    "logs": "docs/deployment.html#logs",
    "reload": "docs/reliability.html#reload",
    "reload models": "docs/reliability.html#reload",
    "store": "docs/commands.html#cloze-store",
    "quantize": "docs/export.html#precision-quantize-to-int8-or-fp16",
    "fine-tune": "docs/questions.html#how-do-i-fine-tune-a-model",
    "rerank": "docs/api.html#post-rerank",
    "truncation": "docs/api.html#long-texts-and-truncation",
    "python client": "docs/clients.html#python-client-of-cloze",
    "openai": "docs/clients.html#openai",
    "install": "docs/deployment.html#install",
    "pip install": "docs/deployment.html#install",
    "langchain": "docs/clients.html#langchain-and-llamaindex",
    "huggingface": "docs/clients.html#huggingface_hub",
}


def test_every_document_is_a_page(site: Path) -> None:
    for document in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/results/*.md")]:
        path = document.relative_to(ROOT)
        index = "index.html" if path.name == "README.md" else f"{path.stem}.html"
        assert (site / path.parent / index).exists(), path


def test_every_result_and_decision_is_listed() -> None:
    for folder in ("bench/results", "docs/decisions"):
        index = (ROOT / folder / "README.md").read_text()
        for page in (ROOT / folder).glob("*.md"):
            assert page.name == "README.md" or f"({page.name})" in index, page


def test_every_link_of_a_page_leads_to_a_file_of_the_site(site: Path) -> None:
    """And no page loads anything from elsewhere."""
    broken = []
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 60
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


def test_the_search_finds_what_users_ask(site: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    index = (site / "search.json").read_text()
    assert (site / "search.js").read_text() == f"var __index = {index};", "pages read from files"
    found = printed([node, str(CLIENTS / "search.mjs"), str(site), *QUESTIONS])
    missed = {
        question: found[question]
        for question, section in QUESTIONS.items()
        if not any(f"{place}#".startswith(f"{section}#") for place in found[question])
    }
    assert missed == {}


def test_the_page_on_upgrading_has_the_schema_of_the_manifests() -> None:
    text = (ROOT / "docs" / "upgrading.md").read_text()
    assert f"`schema_version` in the manifest is {SCHEMA_VERSION}." in text


def test_the_docstrings_are_on_the_pages(site: Path) -> None:
    text = (site / "docs" / "internals" / "batching.html").read_text()
    assert "Clients are served by turns, and so are the lines of a client" in text
    assert "cloze.service.batching.scheduler.Scheduler.submit" in text


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
    ]
    seen = printed(program)
    assert seen["schemes"] == ["file"], "the page asked for something on the network"
    assert seen["messages"] == []
    assert "Order of work" in seen["found"]
    assert seen["opened"].startswith("2. Order of work"), json.dumps(seen)
    assert seen["names"] > 40
    assert (seen["broken"], seen["overflow"]) == ([], False), "on a phone"
