"""Bundles from strangers, with valid digests: each is refused with one line, at once.

What a manifest, a graph or a golden file may not have is tested in tests/unit/model_store; here,
one case of each kind reaches a service.

`tests/support/crafted.py` changes a real bundle in one place and seals it again.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.goldens import read_goldens
from cloze.model_store.graph_checks import check_graph
from cloze.model_store.locations import SHIPPED_NAMES
from cloze.service.errors import StartupError
from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.support.command import call
from tests.support.crafted import Body, Change, craft, edit_graph, edit_json, put, unchanged, write
from tests.support.serving import bare_environment

START_LIMIT_S = 20.0
"""Longest time until a server has refused a bundle."""


@pytest.fixture(scope="session")
def bert(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a bundle for fill-mask, nsp, embed and embed-layers."""
    tasks = ("fill-mask", "nsp", "embed", "embed-layers")
    store = Store(tmp_path_factory.mktemp("store"))
    return export(str(checkpoints["bert"]), "bert", store, ExportOptions(tasks=tasks)).path


def start(root: Path) -> None:
    """Start a service with all bundles of a store, and end it."""
    single_process(load_settings({"model_store": root, "device": "cpu"})).close()


def refusal(root: Path) -> str:
    """Return why a service does not start."""
    with pytest.raises(StartupError) as refused:
        start(root)
    return str(refused.value)


def test_a_bundle_that_is_sealed_again_starts(bert: Path, tmp_path: Path) -> None:
    craft(bert, tmp_path, unchanged)
    start(tmp_path)


@pytest.mark.parametrize("name", SHIPPED_NAMES)
def test_every_graph_of_a_default_bundle_is_accepted(name: str) -> None:
    """A start checks the chosen graph only."""
    bundle = Store().open(name)
    manifest = bundle.manifest
    lower = manifest.lower_precisions()
    graphs = [(manifest.graph, manifest.parity), *((low.graph, low.parity) for low in lower)]
    assert len(graphs) == 3
    for graph, parity in graphs:
        check_graph(bundle, graph)
        assert len(read_goldens(bundle, parity.golden_file, graph.layout)) == 2


def a_link(file: str) -> Change:
    def change(folder: Path, _: Body) -> None:
        (folder / file).rename(folder.parent / "elsewhere")
        (folder / file).symlink_to(folder.parent / "elsewhere")

    return change


def a_pipe(file: str) -> Change:
    def change(folder: Path, _: Body) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return change


def golden(part: str, **values: Any) -> Change:
    return edit_json("golden.json", lambda cases: cases[0][part].update(values))


def add_foreign_operator(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Evil", ["input_ids"], ["unread"], domain="com.evil"))
    model.opset_import.append(helper.make_opsetid("com.evil", 1))


def name_with_control_characters(folder: Path, _: Body) -> None:
    data = (folder / "dense.onnx").read_bytes()
    old, new = b"layers.0.query.bias", b"\x1b[2J\x07s.0.query.bias"
    assert old in data
    assert len(old) == len(new)
    (folder / "dense.onnx").write_bytes(data.replace(old, new, 1))


def look_up_words(value: Body) -> None:
    value["model"] = {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}
    value |= {"added_tokens": [], "post_processor": None}


def tokenizer(edit: Callable[[Any], object]) -> Change:
    return edit_json("tokenizer.json", edit)


OTHER_OUTPUTS = (golden("feeds", pair_rows=[10**6]), "does not reproduce its golden outputs")
REFUSED: dict[str, dict[str, tuple[Change, str]]] = {
    "the manifest of bert@1 is refused: ": {
        "control": (put("license\nline", "\x1b[2J"), r"license\\nline: extra inputs"),
    },
    "bundle bert@1:? ": {
        "link": (a_link("golden.json"), "golden.json.* a symbolic link"),
        "pipe": (a_pipe("weights.bin"), "weights.bin.* a named pipe; a bundle has regular files"),
        "row-outside": OTHER_OUTPUTS,
        "operator": (edit_graph(add_foreign_operator), "'Evil' has the domain 'com.evil'"),
        "name": (name_with_control_characters, "its graph does not load"),
    },
    "bundle bert@1: its tokenizer cannot be read: ": {
        "damaged": (write("tokenizer.json", "x"), "expected value"),
        "model": (tokenizer(look_up_words), "it is WordLevel, not WordPiece, BPE or Unigram"),
        "unknown-token": (
            tokenizer(lambda value: value["model"].update(unk_token="[NONE]")),
            r"its vocabulary lacks the unknown token '\[NONE\]'",
        ),
        "tokens": (
            tokenizer(lambda value: value["model"]["vocab"].update(fly=10**9)),
            "it has 1000000001 tokens, but the manifest's vocab_size is",
        ),
        "mask": (put("tokenizer.mask_id", 0), r"its id of '\[MASK\]' is not the manifest's 0"),
    },
}
CASES = [
    pytest.param(start, change, message, id=name)
    for start, cases in REFUSED.items()
    for name, (change, message) in cases.items()
]


@pytest.mark.parametrize(("start", "change", "message"), CASES)
def test_a_crafted_bundle_is_refused(
    bert: Path, tmp_path: Path, start: str, change: Change, message: str
) -> None:
    craft(bert, tmp_path, change)
    assert_one_line(refusal(tmp_path), message, start=start)


def assert_one_line(line: str, message: str, *, start: str) -> None:
    assert re.match(f"{start}.*{message}", line), line
    assert line.isprintable(), line
    assert len(line) < 600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "integer string conversion"),
        (b" " * (5 * 2**20), "has 5242880 bytes; the limit is 4194304"),
        (None, "is a named pipe"),
    ],
    ids=["nested", "number", "large", "pipe"],
)
def test_a_manifest_that_is_no_manifest_is_refused(
    bert: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    folder = craft(bert, tmp_path, unchanged)
    if content is None:
        a_pipe("manifest.json")(folder, {})
    else:
        (folder / "manifest.json").write_bytes(content)
    assert_one_line(refusal(tmp_path), message, start="the manifest of bert@1")


@pytest.mark.parametrize("frontends", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_server_does_not_start(bert: Path, tmp_path: Path, frontends: str) -> None:
    change, message = OTHER_OUTPUTS
    craft(bert, tmp_path, change)
    serve = ("-m", "cloze", "serve", "--port", "0", "--frontends", frontends, "--device", "cpu")
    command = (sys.executable, *serve, "--model-store", tmp_path)
    done = call(*command, check=False, env=bare_environment(), timeout=START_LIMIT_S)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1, done.stderr
    assert re.fullmatch(rf"cloze: .*{message}.*", lines[0]), done.stderr
