"""Bundles from strangers, with valid digests: each is refused with one line, at once.

What a manifest, a graph or a golden file may not have is tested in tests/unit/model_store; here,
one case of each kind reaches a service.

`tests/support/crafted.py` changes a real bundle in one place and seals it again.
"""

import copy
import json
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.goldens import read_goldens
from cloze.model_store.graph_checks import check_graph
from cloze.model_store.locations import SHIPPED_NAMES
from cloze.service.errors import StartupError
from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.fuzz.damage import json_values, paths_of
from tests.support.crafted import (
    Body,
    Change,
    craft,
    edit_graph,
    edit_json,
    put,
    read_body,
    seal,
    unchanged,
    write,
)
from tests.support.serving import bare_environment, failed_start

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


def start_error(root: Path) -> str | None:
    """Return why a service does not start; None if it starts."""
    try:
        start(root)
    except StartupError as error:
        return str(error)
    return None


def refusal(root: Path) -> str:
    """Return why a service does not start."""
    error = start_error(root)
    assert error is not None, "the service starts"
    return error


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


# ---- manifests -----------------------------------------------------------------------------------


def name_a_file_outside(_: Path, body: Body) -> None:
    body["files"]["../evil"] = body["files"].pop(body["graph"]["file"])
    body["graph"]["file"] = "../evil"


MANIFESTS: dict[str, tuple[Change, str]] = {
    "number": (put("parity.tolerance", float("inf")), r"parity.tolerance: .*got inf"),
    "tasks-twice": (put("tasks", ["nsp", "embed", "nsp"]), r"a task is named twice"),
    "control-characters": (put("license\nline", "\x1b[2J"), r"license\\nline: extra inputs"),
    "nested": (put("nested", json.loads("[" * 400 + "]" * 400)), r"recursion limit exceeded"),
    "outside": (name_a_file_outside, r"plain name without folders"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_crafted_manifest_is_refused(bert: Path, tmp_path: Path, case: str) -> None:
    change, message = MANIFESTS[case]
    craft(bert, tmp_path, change)
    assert_one_line(refusal(tmp_path), message, start=r"the manifest of bert@1 is refused: ")


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
    ],
    ids=["nested", "number", "large"],
)
def test_a_manifest_that_is_no_manifest_is_refused(
    bert: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    folder = craft(bert, tmp_path, unchanged)
    (folder / "manifest.json").write_bytes(content)
    assert_one_line(refusal(tmp_path), message, start=r"the manifest of bert@1 is refused: ")


# ---- files ---------------------------------------------------------------------------------------


def a_link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("make", [a_link, a_pipe])
@pytest.mark.parametrize(
    "file", ["manifest.json", "dense.onnx", "weights.bin", "tokenizer.json", "golden.json"]
)
def test_what_is_no_regular_file_is_refused(
    bert: Path, tmp_path: Path, make: Callable[[Path], None], file: str
) -> None:
    make(craft(bert, tmp_path, unchanged) / file)
    kind = {a_link: "a symbolic link", a_pipe: "a named pipe"}[make]
    start = "the manifest of bert@1" if file == "manifest.json" else rf"bundle bert@1: {file}"
    assert_one_line(refusal(tmp_path), rf"is {kind}; a bundle has regular files only", start=start)


# ---- golden outputs ------------------------------------------------------------------------------


def golden(edit: Callable[[Any], object]) -> Change:
    return edit_json("golden.json", edit)


GOLDENS: dict[str, tuple[Change, str]] = {
    "no-json": (write("golden.json", "weights"), r"is not JSON: Expecting value"),
    "too-many-predictions": (
        golden(lambda cases: cases[0]["feeds"].update(top_k=[10**15])),
        r"does not reproduce its golden outputs",
    ),
    "row-outside": (
        golden(lambda cases: cases[0]["feeds"].update(pair_rows=[10**6])),
        r"does not reproduce its golden outputs",
    ),
    "other-numbers": (
        golden(lambda cases: cases[0]["outputs"].update(logsumexp=[1.0] * 6)),
        r"does not reproduce its golden outputs: logsumexp is off by",
    ),
}


@pytest.mark.parametrize("case", GOLDENS)
def test_a_crafted_golden_file_is_refused(bert: Path, tmp_path: Path, case: str) -> None:
    change, message = GOLDENS[case]
    craft(bert, tmp_path, change)
    assert_one_line(refusal(tmp_path), message, start=r"bundle bert@1:? ")


# ---- graphs --------------------------------------------------------------------------------------


def add_node(operator: str, domain: str = "", **attributes: Any) -> Change:
    """Add a node whose output nothing reads."""
    node = helper.make_node(operator, ["input_ids"], ["unread"], domain=domain, **attributes)

    def edit(model: onnx.ModelProto) -> None:
        model.graph.node.append(node)
        if domain:
            model.opset_import.append(helper.make_opsetid(domain, 1))

    return edit_graph(edit)


def outside(model: onnx.ModelProto) -> TensorProto:
    """Return the first weight outside the ONNX file."""
    return next(tensor for tensor in model.graph.initializer if tensor.external_data)


def place(**values: str) -> Change:
    """Change where the first weight lies."""

    def edit(model: onnx.ModelProto) -> None:
        tensor = outside(model)
        entries = {entry.key: entry.value for entry in tensor.external_data} | values
        del tensor.external_data[:]
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)

    return edit_graph(edit)


def drop_output(name: str) -> Change:
    def edit(model: onnx.ModelProto) -> None:
        kept = [output for output in model.graph.output if output.name != name]
        del model.graph.output[:]
        model.graph.output.extend(kept)

    return edit_graph(edit)


def replace_bytes(file: str, old: bytes, new: bytes) -> Change:
    """Replace the first occurrence of some bytes by as many others."""
    assert len(old) == len(new)

    def change(folder: Path, _: Body) -> None:
        data = (folder / file).read_bytes()
        assert old in data
        (folder / file).write_bytes(data.replace(old, new, 1))

    return change


GRAPHS: dict[str, tuple[Change, str]] = {
    "custom-operator": (
        add_node("Evil", "com.evil"),
        r"the operator 'Evil' has the domain 'com.evil'; .* ONNX and of com.microsoft only",
    ),
    "weights-above": (
        place(location="../../../weights.bin"),
        r"lies in '../../../weights.bin', which is not one of the bundle's files of weights",
    ),
    "output-missing": (drop_output("pair_logits"), r"the graph lacks the output 'pair_logits'"),
    "names-with-control-characters": (
        replace_bytes("dense.onnx", b"layers.0.query.bias", b"\x1b[2J\x07s.0.query.bias"),
        r"its graph does not load",
    ),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_a_crafted_graph_is_refused(bert: Path, tmp_path: Path, case: str) -> None:
    change, message = GRAPHS[case]
    craft(bert, tmp_path, change)
    assert_one_line(refusal(tmp_path), message, start=r"bundle bert@1: ")


# ---- tokenizers ----------------------------------------------------------------------------------


def tokenizer(edit: Callable[[Any], object]) -> Change:
    return edit_json("tokenizer.json", edit)


def look_up_words(value: Body) -> None:
    value["model"] = {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}
    value |= {"added_tokens": [], "post_processor": None}


PADDING = {
    "strategy": {"Fixed": 10**9},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "[PAD]",
}

TOKENIZERS: dict[str, tuple[Change, str]] = {
    "no-json": (write("tokenizer.json", "x"), r"expected value"),
    "another-model": (tokenizer(look_up_words), r"it is WordLevel, not WordPiece, BPE or Unigram"),
    "padding": (tokenizer(lambda value: value.update(padding=PADDING)), r"it truncates or pads"),
    "unknown-token": (
        tokenizer(lambda value: value["model"].update(unk_token="[NONE]")),
        r"its vocabulary lacks the unknown token '\[NONE\]'",
    ),
    "fewer-tokens": (
        put("tokenizer.vocab_size", 90),
        r"it has \d+ tokens, but the manifest's vocab_size is 90",
    ),
    "more-tokens": (
        tokenizer(lambda value: value["model"]["vocab"].update(fly=10**9)),
        r"it has 1000000001 tokens, but the manifest's vocab_size is \d+",
    ),
    "mask-id": (put("tokenizer.mask_id", 0), r"its id of '\[MASK\]' is not the manifest's 0"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_crafted_tokenizer_is_refused(bert: Path, tmp_path: Path, case: str) -> None:
    change, message = TOKENIZERS[case]
    craft(bert, tmp_path, change)
    start = r"bundle bert@1: its tokenizer cannot be read: "
    assert_one_line(refusal(tmp_path), message, start=start)


# ---- any value of a manifest ---------------------------------------------------------------------


@pytest.mark.slow
@settings(
    max_examples=150,
    deadline=timedelta(seconds=START_LIMIT_S),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_any_value_of_a_manifest_starts_or_is_refused(
    bert: Path, tmp_path: Path, data: st.DataObject
) -> None:
    folder = tmp_path / "bert" / "1"
    if not folder.exists():
        craft(bert, tmp_path, unchanged)
    body = read_body(bert)
    *parents, last = data.draw(st.sampled_from(sorted(paths_of(body), key=repr)))
    parent: Any = body
    for each in parents:
        parent = parent[each]
    if data.draw(st.booleans()):
        parent[last] = data.draw(json_values)
    elif isinstance(parent, dict) and data.draw(st.booleans()):
        parent[data.draw(st.text(max_size=5))] = parent.pop(last)
    elif isinstance(parent, list):
        parent.append(copy.deepcopy(parent[last]))
    else:
        del parent[last]
    try:
        seal(folder, body, measure=False)
    except UnicodeEncodeError:  # no file has lone surrogates
        return
    error = start_error(tmp_path)
    assert error is None or error.isprintable(), error


# ---- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("frontends", ["0", "1"])
def test_a_server_does_not_start(bert: Path, tmp_path: Path, frontends: str) -> None:
    change, message = GOLDENS["row-outside"]
    craft(bert, tmp_path, change)
    log = failed_start(
        "--model-store", str(tmp_path), "--frontends", frontends, "--device", "cpu",
        env=bare_environment(), timeout_s=START_LIMIT_S,
    )  # fmt: skip
    lines = [line for line in log.splitlines() if " INFO " not in line]
    assert len(lines) == 1, log
    assert re.fullmatch(rf"cloze: .*{message}.*", lines[0]), log
