"""The command blocks and the links of README and docs. Calls are sent to a server that has every
task; the commands of the README and of the page Start run in order in a fresh clone (slow).
"""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import call
from tests.support.documents import DOCUMENTS, ROOT, Block, blocks
from tests.support.serving import Server, bare_environment
from tests.support.waiting import wait_until

ALL = [block for document in DOCUMENTS for block in blocks(document)]
CALLS = [block for block in ALL if "curl localhost:8000" in block.text and not block.not_run]


def named(block: Block) -> str:
    return f"{block.document}:{block.line}"


def test_every_block_is_a_call_or_marked() -> None:
    assert len(CALLS) > 30
    marked = [block for block in ALL if block.not_run or block.slow]
    unmarked = [named(block) for block in ALL if block not in CALLS and block not in marked]
    assert unmarked == [], (
        "run these blocks, or mark them: <!-- not run: reason --> or <!-- slow -->"
    )


LINKING = [*DOCUMENTS, *ROOT.glob("*.md"), *ROOT.glob("docs/decisions/*.md"),
           *ROOT.glob("bench/**/*.md")]  # fmt: skip


def anchors(document: Path) -> set[str]:
    """Return the fragments of a page: its headings as GitHub and the site write them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    texts = [re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for document in LINKING:
        for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            if re.match(r"https?:|mailto:", link):
                continue
            path, _, fragment = link.partition("#")
            target = document.parent / path if path else document
            if not target.is_file() or (fragment and fragment not in anchors(target)):
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    assert broken == []


@pytest.mark.parametrize("block", CALLS, ids=named)
def test_a_call_gets_its_answer(every_task: Server, block: Block, tmp_path: Path) -> None:
    """The models are small and random, so test_examples compares answers."""
    server = every_task.url.removeprefix("http://")
    for command in commands(block.text):
        curl = command.replace("curl localhost:8000", f"curl -s -w '\\n%{{http_code}}' {server}")
        done = subprocess.run(
            ["bash", "-c", curl], cwd=tmp_path, capture_output=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        status = int(done.stdout.splitlines()[-1])
        assert status == block.status, done.stdout[-300:]


def commands(text: str) -> list[str]:
    """Return the commands of a block: a command goes on after a backslash or within quotes."""
    found: list[str] = []
    for line in text.splitlines():
        if found and (found[-1].endswith("\\") or found[-1].count("'") % 2):
            found[-1] = (
                f"{found[-1].removesuffix(chr(92))}\n{line}"
                if found[-1].count("'") % 2
                else (f"{found[-1][:-1]} {line.strip()}")
            )
        elif line.strip():
            found.append(line.strip())
    return [re.sub(r"\s+#.*$", "", command) for command in found]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_first_pages_run_from_a_fresh_clone(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Run the commands literally and in order; a server runs until the next one starts."""
    if listens():
        pytest.skip("the README's port 8000 is in use")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    shutil.copytree(checkpoints["bert"], clone / "my-bert")
    (clone / "my.txt").write_text(random_text())
    # What `make install` has made of the same files, but for where the store is.
    (clone / ".venv").symlink_to(sys.prefix)
    environment = bare_environment(
        HOME=str(tmp_path),
        PATH=os.environ["PATH"],
        CLOZE_MODEL_STORE=str(clone / "model_store/bundles"),
    )
    server: subprocess.Popen[bytes] | None = None
    try:
        pages = [*blocks(ROOT / "README.md"), *blocks(ROOT / "docs/start.md")]
        for block in (block for block in pages if not block.not_run):
            for command in commands(block.text):
                if "pretrain" in command:  # the recipe that it takes, with two steps
                    command += f" --recipe {quick_recipe(tmp_path)}"
                if re.search(r"(^make| )serve\b", command):
                    stop(server)
                    server = start(command, clone, environment)
                    continue
                call(
                    "bash", "-c", command.replace("curl ", "curl -sf "), cwd=clone, env=environment
                )
    finally:
        stop(server)


def quick_recipe(folder: Path) -> Path:
    """Write the default recipe of pre-training with two steps, not with five minutes of them."""
    recipe = (ROOT / "export/cloze/export/train/recipes/pretrain-5-minutes.toml").read_text()
    quick = folder / "quick.toml"
    quick.write_text(re.sub(r"^steps = .*$", "steps = 2", recipe, flags=re.MULTILINE))
    return quick


def random_text() -> str:
    """Return documents of made-up words, enough for the default vocabulary."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(8000)]
    return "\n\n".join(" ".join(rng.choices(words, k=150)) + "." for _ in range(600))


def listens() -> bool:
    """Return whether something listens on the README's port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", 8000)) == 0


def start(command: str, clone: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a server, and wait until it is ready on port 8000."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=clone, env=environment, start_new_session=True
    )

    def is_ready() -> bool:
        assert process.poll() is None, command
        return listens()

    wait_until(is_ready, longest_s=600)
    return process


def stop(server: "subprocess.Popen[bytes] | None") -> None:
    """Stop a server with the shell and the make that started it."""
    if server is not None and server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
        wait_until(lambda: not listens(), longest_s=60)  # make ends before its server
