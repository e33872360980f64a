"""The benchmark measures peers: made ones that answer as the real ones do, and the real ones."""

import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cloze.bench.result import Result as Figures
from cloze.cli import cli
from tests.conftest import minilm_checkpoint

MADE_INFINITY = f"""#!{sys.executable}
import http.server, sys
assert sys.argv[1] == "v2", sys.argv
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        known = {{"GET": "/health", "POST": "/embeddings"}}[self.command] == self.path
        self.send_response(200 if known else 404)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    do_GET = do_POST = answer
    log_message = lambda *_: None

address = ("127.0.0.1", int(options["--port"]))
http.server.ThreadingHTTPServer(address, Handler).serve_forever()
"""

MADE_PYTHON = """#!/bin/sh
echo '{"infinity-emb": "0.0.1"}'
"""


@pytest.fixture
def made_infinity(tmp_path: Path) -> Path:
    """Return an interpreter beside a program that answers like infinity-emb."""
    for name, text in {"infinity_emb": MADE_INFINITY, "python": MADE_PYTHON}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    return tmp_path / "python"


@pytest.fixture
def made_checkpoint(tmp_path: Path) -> Path:
    """Return a folder that looks like a checkpoint."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def run(store: Path, *arguments: str) -> Result:
    model = () if "--model" in arguments else ("--model", "bert")
    common = ("--model-store", str(store), "--seconds", "0.3", "--turns", "1", "--no-bulk")
    few = ("--count", "40", "--shares", "0.3", "--clients", "1,2")
    return CliRunner().invoke(cli, ["bench", "run", *model, *common, *few, *arguments])


@pytest.mark.slow
def test_short_and_long_texts_of_ours_and_a_peer(
    tiny_store: Path, made_infinity: Path, made_checkpoint: Path, tmp_path: Path
) -> None:
    sets = ("--texts", "questions", "--texts", "passages")
    peer = ("--infinity", str(made_infinity), "--checkpoint", str(made_checkpoint))
    done = run(tiny_store, *sets, *peer, "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    found = Figures.from_json(tmp_path / "out.json")
    assert found.subjects() == ["bert engine", "bert server", "infinity-emb"]
    assert [load.name for load in found.loads()] == [
        f"{load} {name}"
        for name in ("questions", "passages")
        for load in ("closed 1", "closed 2", "poisson 0.3")
    ]
    assert found.versions["infinity-emb"] == {"infinity-emb": "0.0.1"}
    assert set(found.texts) == {"questions", "passages"}
    assert not any(turn.failed for turn in found.turns)
    served = [turn for turn in found.turns if "engine" not in turn.subject]
    assert all(turn.client_cpu_ms > 0 for turn in served)
    written = (tmp_path / "out.md").read_text()
    assert "| closed 2 questions | bert server | infinity-emb |" in written


def test_a_peer_that_cannot_be_measured_is_one_line(
    tiny_store: Path, made_checkpoint: Path
) -> None:
    done = run(tiny_store, "--infinity", sys.executable, "--checkpoint", str(made_checkpoint))
    assert done.exit_code == 1
    (line,) = done.stderr.strip().splitlines()
    assert f"infinity-emb needs infinity-emb, which {sys.executable} does not have" in line


@pytest.mark.slow
def test_an_application_around_a_library(minilm_store: Path, tmp_path: Path) -> None:
    peer = f"--sentence-transformers={sys.executable}"
    arguments = ("--model", "minilm", "--model-store", str(minilm_store), "--texts", "questions")
    short = ("--seconds", "2", "--turns", "1", "--count", "40", "--clients", "1,4", "--no-bulk")
    checkpoint = ("--checkpoint", str(minilm_checkpoint()), "--out", str(tmp_path / "out"))
    command = ["bench", "run", *arguments, *short, "--shares", "0.3", peer, *checkpoint]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    turns = Figures.from_json(tmp_path / "out.json").turns
    theirs = [turn for turn in turns if turn.subject == "FastAPI + sentence-transformers torch"]
    assert len(theirs) == 3
    assert all(turn.answered and not turn.failed for turn in theirs)
