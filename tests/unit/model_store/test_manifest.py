"""What a manifest may say: each limit, and each pair of fields that must agree."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cloze.model_store import limits
from cloze.model_store.manifest import Manifest, Precision, parse_reference, seal
from cloze.model_store.tensors import POSITION_TABLE, WORD_TABLE
from tests.support.refusals import check_table
from tests.support.task_model import LABELS, manifest

FIELDS: Mapping[str, Any] = manifest().model_dump(mode="json")
STORED = {"size": 1, "sha256": "0" * 64}
INT8 = {
    "graph": {"file": "g8.onnx", "layout": "dense", "precision": "int8", "opset": 20, "operators": {}},
    "parity": FIELDS["parity"] | {"golden_file": "golden8.json"},
    "gate": {"measured": {"cosine": 0.9}, "limits": {"cosine": 0.9}},
}  # fmt: skip
FILES = FIELDS["files"] | {"g8.onnx": STORED, "golden8.json": STORED}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the fields with another value at a path such as ``architecture.layers``."""
    *parents, last = path.split(".")
    fields: dict[str, Any] = dict(FIELDS)
    inner = fields
    for name in parents:
        inner[name] = dict(inner[name])
        inner = inner[name]
    inner[last] = value
    return fields


def outcome(_: str, change: str) -> str:
    path, value = eval(change, NAMES)
    try:
        Manifest.model_validate(changed(path, value))
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return "accepted"


SIZES = FIELDS["architecture"]
IDS = FIELDS["tokenizer"]["vocab_size"]
MANY = FIELDS["files"] | {f"f{n}": STORED for n in range(61)}
NAMES = {
    "FIELDS": FIELDS, "TASKS": FIELDS["tasks"], "LABELS": list(LABELS), "MANY": MANY, "IDS": IDS,
    "WORDS": {WORD_TABLE: [SIZES["vocab_size"], 8]}, "NAN": float("nan"), "INFINITE": float("inf"),
    "POSITIONS": {POSITION_TABLE: [SIZES["max_positions"], 8]}, "STORED": STORED,
    "MORE": {POSITION_TABLE: [SIZES["max_positions"] + 1, 8]}, "TOLERANCE": limits.MAX_TOLERANCE,
    "GATE": {"measured": {"cosine": 0.9}, "limits": {"cosine": 0.9}},
}  # fmt: skip


def test_values_that_a_manifest_may_have() -> None:
    """A line of `manifests.txt` has a reason, a path with a value in Python, and the problem."""
    check_table(Path(__file__).with_name("manifests.txt"), outcome)


@pytest.mark.parametrize(
    ("section", "file"),
    [
        *((None, file) for file in ("tokenizer.json", "g.onnx", "golden.json")),
        *((section, file) for section in ("int8", "fp16") for file in ("g8.onnx", "golden8.json")),
    ],
)
def test_named_files_are_listed(section: str | None, file: str) -> None:
    fields = dict(FIELDS)
    if section is not None:
        fields |= {section: INT8 | {"graph": INT8["graph"] | {"precision": section}}}
    fields["files"] = FILES
    described = Manifest.model_validate(fields)
    assert [one.graph.file for one in described.lower_precisions()] == ["g8.onnx"] * bool(section)
    fields["files"] = {name: stored for name, stored in FILES.items() if name != file}
    with pytest.raises(ValueError, match=f"the file '{file}' is named but not listed"):
        Manifest.model_validate(fields)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("a", True), ("A-b_c.9", True), ("a" * 64, True), ("9a", True),
        ("", False), ("a" * 65, False), (".a", False), ("-a", False), ("_a", False), ("a/b", False),
        ("a b", False), ("é", False),
    ],
)  # fmt: skip
def test_names_of_bundles_and_of_files(name: str, good: bool) -> None:
    assert (outcome("", f"'name', {name!r}") == "accepted") is good
    fields = changed("tokenizer.file", name)
    fields["files"] = FIELDS["files"] | {name: STORED}
    if good:
        Manifest.model_validate(fields)
        assert parse_reference(name) == (name, None)
        assert parse_reference(f"{name}@12") == (name, 12)
    else:
        with pytest.raises(ValueError, match="plain name"):
            Manifest.model_validate(fields)
        with pytest.raises(ValueError, match="is not a bundle name"):
            parse_reference(name)


def test_a_reference_has_a_positive_version() -> None:
    for version in ("0", "", "-1", "1.0", "x", "\N{SUPERSCRIPT TWO}", "+1"):
        with pytest.raises(ValueError, match="is not a version: versions are 1, 2, 3"):
            parse_reference(f"a@{version}")
    assert parse_reference("a@1") == ("a", 1)


ADAPTERS: dict[str, Any] = {
    "graph": FIELDS["graph"] | {"file": "a.onnx"},
    "int8": INT8["graph"] | {"file": "a8.onnx"},
    "prefixes": ["bert."],
    "layers": {
        "one": {"numbers": [0], "inputs": 8, "outputs": 8},
        "two": {"numbers": [1, 2], "inputs": 8, "outputs": 8},
    },
    "heads": {},
    "tensors_file": "heads.safetensors",
}
ADAPTER_FILES = dict.fromkeys(("a.onnx", "a8.onnx", "heads.safetensors"), STORED)


@pytest.mark.parametrize(
    ("file", "limit"),
    [
        ("tokenizer.json", 2**25), ("g.onnx", 2**21), ("golden.json", 2**24), ("weights.bin", 2**34),
        ("a.onnx", 2**21), ("a8.onnx", 2**21), ("heads.safetensors", 2**29),
    ],
)  # fmt: skip
def test_files_have_a_largest_size(file: str, limit: int) -> None:
    fields = changed("adapters", ADAPTERS)
    for size in (limit, limit + 1, -1):
        fields["files"] = FILES | ADAPTER_FILES | {file: STORED | {"size": size}}
        with (
            nullcontext()
            if size == limit
            else pytest.raises(ValueError, match=r"limit|greater|less")
        ):
            Manifest.model_validate(fields)
    if file in ADAPTER_FILES:
        del fields["files"][file]
        with pytest.raises(ValueError, match=f"the file '{file}' is named but not listed"):
            Manifest.model_validate(fields)


@pytest.mark.parametrize("numbers", [[1], [1, 1], [0, 1], [2, 3]], ids=str)
def test_adapted_layers_have_each_place_once(numbers: list[int]) -> None:
    two = ADAPTERS["layers"] | {"two": ADAPTERS["layers"]["two"] | {"numbers": numbers}}
    fields = changed("adapters", ADAPTERS | {"layers": two})
    fields["files"] = FILES | ADAPTER_FILES
    if numbers == [1]:
        assert Manifest.model_validate(fields).adapters is not None
    else:
        with pytest.raises(ValueError, match="must be 0 to N - 1, each once"):
            Manifest.model_validate(fields)


def test_the_precision_of_a_graph_is_that_of_its_section() -> None:
    fields = changed("fp16", INT8)
    fields["files"] = FILES
    with pytest.raises(ValueError, match=r"the graph g8.onnx is int8, but its section is fp16"):
        Manifest.model_validate(fields)
    assert manifest().graph_of(Precision.FP32) == manifest().graph
    assert manifest().graph_of(Precision.INT8) is None


def test_fields_of_earlier_releases_are_left_out_and_the_digest_stays() -> None:
    """No reader uses them. A bundle's digest is that of its file."""
    fields = json.loads(manifest().to_bytes())
    del fields["digest"]
    fields["architecture"] |= {"intermediate_size": 8, "activation": "x", "layer_norm_eps": 1e-12}
    fields["architecture"] |= {"layer_heads": [1] * 4, "layer_intermediate_sizes": [8] * 4}
    fields["parity"] |= {"batches": [1, 2], "lengths": [3]}
    data = seal(fields)
    earlier = Manifest.from_bytes(data)
    assert earlier.digest == json.loads(data)["digest"] != manifest().digest
    assert earlier.model_dump() == manifest().model_dump()


def test_a_manifest_comes_back_from_its_bytes_only() -> None:
    data = manifest().to_bytes()
    assert Manifest.from_bytes(data) == manifest()
    assert manifest().digest in data.decode()
    assert manifest().reference == "tiny@3"
    with pytest.raises(ValueError, match="digest does not match"):
        Manifest.from_bytes(data.replace(b'"tiny"', b'"tinx"'))
    for wrong, problem in (
        (
            data.replace(b'"schema_version": 1', b'"schema_version": 2'),
            "is 2; this release reads 1",
        ),
        (b"{}", "schema_version is None"),
        (b"[]", "a manifest is a JSON object"),
        (b"{", "it is not JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ):
        with pytest.raises(ValueError, match=problem):
            Manifest.from_bytes(wrong)


def written(path: str, value: Any) -> dict[str, Any]:
    """Return what a manifest with another value at a path has as JSON."""
    body: dict[str, Any] = json.loads(Manifest.model_validate(changed(path, value)).to_bytes())
    return body


def test_fields_that_earlier_releases_do_not_know_are_written_only_with_a_value() -> None:
    assert "further_poolings" not in written("version", 3)["embedding"]
    joined = written("embedding.further_poolings", ["cls"])
    assert joined["embedding"]["further_poolings"] == ["cls"]
    assert "tables" not in written("tables", None)
    unknown = written("tokenizer.second_type", None)["tokenizer"]
    assert not {"second_type", "pair_separators"} & unknown.keys()
    known = written("tokenizer.second_type", 0)["tokenizer"]
    assert {"second_type", "pair_separators"} <= known.keys()
    for side, is_written in (("right", False), ("left", True)):
        said = written("tokenizer.truncation_side", side)["tokenizer"]
        assert ("truncation_side" in said, "second_type" in said) == (is_written, False)
    head = "sequence_classification"
    assert "raw_scores" not in written("version", 3)["heads"][head]
    raw = written(f"heads.{head}.raw_scores", True)
    assert raw["heads"][head]["raw_scores"] is True
    without = [one for one in FIELDS["tasks"] if "classification" not in one and one != "entities"]
    bare = Manifest.model_validate(FIELDS | {"tasks": without, "heads": {}})
    assert "heads" not in json.loads(bare.to_bytes())
