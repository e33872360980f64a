"""The benchmark measures peers: made ones that answer as the real ones do, and the real ones."""

import os
import shutil
import stat
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModel

from cloze.bench.errors import BenchError
from cloze.bench.peers import PEERS
from cloze.bench.peers.peer import PeerModel
from cloze.bench.peers.plain_onnx import write
from cloze.bench.result import Result as Figures
from cloze.bench.run import length_class
from cloze.cli import cli
from tests.conftest import minilm_checkpoint

TEI = os.environ.get("CLOZE_TEST_TEI")
"""Path of the program text-embeddings-inference. Read here, since tests have no such variables."""

MADE_TEI = f"""#!{sys.executable}
import http.server, sys
if sys.argv[1:] == ["--version"]:
    sys.exit(print("text-embeddings-router 0.0.1"))
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["--pooling"] == "mean", options

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        known = {{"GET": "/health", "POST": "/embed"}}[self.command] == self.path
        self.send_response(200 if known else 404)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    do_GET = do_POST = answer
    log_message = lambda *_: None

address = ("127.0.0.1", int(options["--port"]))
http.server.ThreadingHTTPServer(address, Handler).serve_forever()
"""


@pytest.fixture
def made_tei(tmp_path: Path) -> Path:
    """Return a program that answers like text-embeddings-inference."""
    program = tmp_path / "tei"
    program.write_text(MADE_TEI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.fixture
def made_checkpoint(tmp_path: Path) -> Path:
    """Return a folder that looks like a checkpoint with a graph."""
    folder = tmp_path / "checkpoint"
    (folder / "onnx").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "onnx" / "model.onnx").write_text("")
    return folder


def run(store: Path, *arguments: str) -> Result:
    model = () if "--model" in arguments else ("--model", "bert")
    common = ("--model-store", str(store), "--seconds", "0.3", "--turns", "1", "--no-bulk")
    few = ("--count", "40", "--shares", "0.3", "--clients", "1,2")
    return CliRunner().invoke(cli, ["bench", "run", *model, *common, *few, *arguments])


def test_short_and_long_texts_of_ours_and_a_peer(
    tiny_store: Path, made_tei: Path, made_checkpoint: Path, tmp_path: Path
) -> None:
    sets = ("--texts", "questions", "--texts", "passages")
    peer = ("--tei", str(made_tei), "--checkpoint", str(made_checkpoint))
    done = run(tiny_store, *sets, *peer, "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    found = Figures.from_json(tmp_path / "out.json")
    assert found.subjects() == ["bert engine", "bert server", "text-embeddings-inference"]
    assert found.loads() == [
        f"{load} {name}"
        for name in ("questions", "passages")
        for load in ("closed 1", "closed 2", "poisson 0.3")
    ]
    assert found.versions["text-embeddings-inference"] == {"text-embeddings-router": "0.0.1"}
    assert set(found.texts) == {"questions", "passages"}
    assert not any(turn.failed for turn in found.turns)
    served = [turn for turn in found.turns if "engine" not in turn.subject]
    assert all(turn.client_cpu_ms > 0 for turn in served)
    assert all(turn.by_length for turn in served)
    written = (tmp_path / "out.md").read_text()
    assert "| closed 2 questions | bert server | text-embeddings-inference |" in written
    assert "| closed 2 passages | bert server | above 128 tokens |" in written


def test_a_peer_that_takes_fewer_texts_per_request_is_left_out(
    tiny_store: Path, made_tei: Path, made_checkpoint: Path
) -> None:
    peer = ("--tei", str(made_tei), "--checkpoint", str(made_checkpoint))
    done = run(tiny_store, *peer, "--each", "33")
    assert done.exit_code == 0, done.output
    line = "text-embeddings-inference is left out: it takes 32 texts per request"
    assert line in done.stderr
    assert "| text-embeddings-inference |" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--tei", "tei"], "peers need the weights as a checkpoint: give --checkpoint"),
        (["--tei", "tei", "--checkpoint", "docs"], "docs is no checkpoint: it has no config.json"),
        (
            ["--tei", "nowhere", "--checkpoint", "MADE"],
            "the program nowhere of text-embeddings-inference does not start: [Errno 2]",
        ),
        (
            ["--tei", "/bin/echo", "--checkpoint", "MADE"],
            "/bin/echo is not text-embeddings-inference: --version prints",
        ),
        (
            ["--tei", "tei", "--checkpoint", "MADE", "--task", "fill-mask"],
            "text-embeddings-inference does not serve fill-mask",
        ),
        (
            ["--infinity", "nowhere/python", "--checkpoint", "MADE"],
            "the interpreter nowhere/python of infinity-emb does not start: [Errno 2]",
        ),
        (
            ["--infinity", sys.executable, "--checkpoint", "MADE"],
            f"infinity-emb needs infinity-emb, which {sys.executable} does not have",
        ),
        (
            [
                *("--sentence-transformers", sys.executable, "--checkpoint", "MADE"),
                *("--backend", "torch", "--backend", "openvino"),
            ],
            f"sentence-transformers needs optimum-intel, openvino, which {sys.executable} does not",
        ),
        (["--texts", "docs/api.md", "--texts", "./docs/api.md"], "two sets of texts have the same"),
    ],
)
def test_a_peer_that_cannot_be_measured_is_one_line(
    arguments: list[str], line: str, tiny_store: Path, made_checkpoint: Path
) -> None:
    done = run(tiny_store, *(str(made_checkpoint) if a == "MADE" else a for a in arguments))
    assert done.exit_code == 1
    assert line in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_tei_needs_a_graph(made_checkpoint: Path) -> None:
    (made_checkpoint / "onnx" / "model.onnx").unlink()
    with pytest.raises(BenchError, match=r"plain_onnx .*checkpoint$"):
        PEERS[0].servers("tei", PeerModel(made_checkpoint, "embed"))


def test_infinity_runs_a_graph_where_it_can(
    made_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = next(peer for peer in PEERS if peer.option == "infinity")
    model = PeerModel(made_checkpoint, "embed")
    packages = {"infinity-emb": "0.0.77", "optimum": "2.0"}
    monkeypatch.setattr("cloze.bench.peers.peer.installed_versions", lambda _: packages)

    def names() -> list[str]:
        return [server.name for server in peer.servers("bin/python", model)]

    assert names() == ["infinity-emb torch", "infinity-emb optimum"]
    del packages["optimum"]
    assert names() == ["infinity-emb torch"]
    packages["optimum"] = "2.0"
    (made_checkpoint / "onnx" / "model.onnx").unlink()
    assert names() == ["infinity-emb torch"]


def test_classes_of_length() -> None:
    assert [length_class(tokens) for tokens in (1, 32, 33, 128, 129)] == [
        "to 32 tokens",
        "to 32 tokens",
        "to 128 tokens",
        "to 128 tokens",
        "above 128 tokens",
    ]


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_the_plain_graph_computes_what_transformers_does(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(checkpoints[family], checkpoint)
    session = ort.InferenceSession(write(checkpoint), providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(5, 50, (3, 11))
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    if family == "bert":
        inputs["token_type_ids"] = np.zeros_like(ids)
    model = AutoModel.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        named = {name: torch.from_numpy(value) for name, value in inputs.items()}
        expected = model(**named).last_hidden_state.numpy()
    np.testing.assert_allclose(session.run(None, inputs)[0], expected, atol=1e-5)


def test_text_embeddings_inference_itself(minilm_store: Path, tmp_path: Path) -> None:
    if TEI is None:
        pytest.skip("CLOZE_TEST_TEI does not name the program text-embeddings-inference")
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(minilm_checkpoint(), checkpoint)
    write(checkpoint)
    out = str(tmp_path / "out")
    peer = ("--tei", TEI, "--checkpoint", str(checkpoint), "--out", out)
    done = run(minilm_store, *peer, "--model", "minilm", "--texts", "questions")
    assert done.exit_code == 0, done.output
    turns = Figures.from_json(tmp_path / "out.json").turns
    theirs = [turn for turn in turns if turn.subject == "text-embeddings-inference"]
    assert len(theirs) == 3, done.stderr
    assert all(turn.answered and not turn.failed for turn in theirs)


@pytest.mark.slow
def test_applications_around_libraries(minilm_store: Path, tmp_path: Path) -> None:
    peers = [f"--{name}={sys.executable}" for name in ("sentence-transformers", "pipeline")]
    arguments = ("--model", "minilm", "--model-store", str(minilm_store), "--texts", "questions")
    short = ("--seconds", "2", "--turns", "1", "--count", "40", "--clients", "1,4", "--no-bulk")
    checkpoint = ("--checkpoint", str(minilm_checkpoint()), "--out", str(tmp_path / "out"))
    command = ["bench", "run", *arguments, *short, "--shares", "0.3", *peers, *checkpoint]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    turns = Figures.from_json(tmp_path / "out.json").turns
    for name in ("FastAPI + sentence-transformers torch", "FastAPI + transformers"):
        theirs = [turn for turn in turns if turn.subject == name]
        assert len(theirs) == 3
        assert all(turn.answered and not turn.failed for turn in theirs)
