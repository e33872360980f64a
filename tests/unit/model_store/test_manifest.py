"""What a manifest may say: each limit, and each pair of fields that must agree."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from cloze.model_store import Store, limits
from cloze.model_store.heads import Pooling
from cloze.model_store.layouts import Layout
from cloze.model_store.locations import DEFAULT_ROOT, SHIPPED_NAMES
from cloze.model_store.manifest import Manifest, Precision, parse_reference, seal
from cloze.model_store.tensors import POSITION_TABLE, WORD_TABLE
from tests.unit.service.tasks.model import LABELS, manifest

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


def accepts(path: str, value: Any) -> bool:
    try:
        Manifest.model_validate(changed(path, value))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("path", "least", "most"),
    [
        ("architecture.vocab_size", 103, 2_000_000),
        ("architecture.hidden_size", 1, 65_536),
        ("architecture.layers", 1, 128),
        ("architecture.heads", 1, 65_536),
        ("architecture.max_positions", 12, 16_384),
        ("architecture.type_vocab_size", 0, 65_536),
        ("architecture.parameters", 1, 10**11),
        ("embedding.dimensions", 1, 65_536),
        ("embedding.max_tokens", 3, 12),
        ("version", 1, 10**9),
        ("tokenizer.cls_id", 0, None),
        ("tokenizer.sep_id", 0, None),
    ],
)
def test_numbers_have_limits(path: str, least: int, most: int | None) -> None:
    if path == "architecture.vocab_size":
        least = FIELDS["tokenizer"]["vocab_size"]
    assert accepts(path, least)
    assert not accepts(path, least - 1)
    if path == "version":
        return
    if most is not None:
        assert accepts(path, most)
        assert not accepts(path, most + 1)


def test_the_tokenizer_s_ids_are_in_its_vocabulary() -> None:
    size = FIELDS["tokenizer"]["vocab_size"]
    for name in ("cls_id", "sep_id", "mask_id"):
        assert accepts(f"tokenizer.{name}", size - 1)
        assert not accepts(f"tokenizer.{name}", size)
        assert not accepts(f"tokenizer.{name}", -1)


def test_sizes_agree_with_each_other() -> None:
    assert accepts("limits.max_tokens", 16)
    assert not accepts("limits.max_tokens", 17)
    assert not accepts("limits.max_tokens", 2)
    with pytest.raises(ValueError, match=r"embedding.max_tokens is 13; the model's limit is 12"):
        Manifest.model_validate(changed("embedding.max_tokens", 13))
    assert accepts("architecture.vocab_size", FIELDS["tokenizer"]["vocab_size"] + 8)
    with pytest.raises(ValueError, match=r"tokenizer.vocab_size is"):
        Manifest.model_validate(changed("architecture.vocab_size", 100))


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("a", True), ("A-b_c.9", True), ("a" * 64, True), ("9a", True),
        ("", False), ("a" * 65, False), (".a", False), ("-a", False), ("_a", False), ("a/b", False),
        ("a b", False), ("é", False),
    ],
)  # fmt: skip
def test_names_of_bundles_and_of_files(name: str, good: bool) -> None:
    assert accepts("name", name) is good
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


def test_tolerances_and_errors_are_numbers() -> None:
    assert accepts("parity.tolerance", limits.MAX_TOLERANCE)
    for wrong in (0, limits.MAX_TOLERANCE + 1e-4, float("nan"), float("inf")):
        assert not accepts("parity.tolerance", wrong)
    assert not accepts("parity.max_error", {"embeddings": float("nan")})


def test_graphs_are_onnx_files() -> None:
    fields = changed("graph.file", "g.ort")
    fields["files"] = FIELDS["files"] | {"g.ort": STORED}
    with pytest.raises(ValueError, match="onnx"):
        Manifest.model_validate(fields)


@pytest.mark.parametrize("file", ["tokenizer.json", "g.onnx", "golden.json"])
def test_named_files_are_listed(file: str) -> None:
    files = {name: stored for name, stored in FIELDS["files"].items() if name != file}
    with pytest.raises(ValueError, match=f"the file '{file}' is named but not listed"):
        Manifest.model_validate(changed("files", files))


@pytest.mark.parametrize("section", ["int8", "fp16"])
@pytest.mark.parametrize("file", ["g8.onnx", "golden8.json"])
def test_files_of_lower_precisions_are_listed(section: str, file: str) -> None:
    lower = INT8 | {"graph": INT8["graph"] | {"precision": section}}
    fields = changed(section, lower)
    fields["files"] = FILES
    described = Manifest.model_validate(fields)
    assert [one.graph.file for one in described.lower_precisions()] == ["g8.onnx"]
    assert described.graph_of(Precision(section)) == described.lower_precisions()[0].graph
    fields["files"] = {name: stored for name, stored in FILES.items() if name != file}
    with pytest.raises(ValueError, match=f"the file '{file}' is named but not listed"):
        Manifest.model_validate(fields)


@pytest.mark.parametrize(
    ("file", "limit"),
    [
        ("tokenizer.json", 32 * 2**20),
        ("g.onnx", 2 * 2**20),
        ("golden.json", 16 * 2**20),
        ("weights.bin", 16 * 2**30),
    ],
)
def test_files_have_a_largest_size(file: str, limit: int) -> None:
    def with_size(size: int) -> dict[str, Any]:
        return changed("files", FIELDS["files"] | {file: STORED | {"size": size}})

    Manifest.model_validate(with_size(limit))
    for size in (limit + 1, -1):
        with pytest.raises(ValueError, match=r"limit|greater|less"):
            Manifest.model_validate(with_size(size))


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
    ("file", "limit"), [("a.onnx", 2**21), ("a8.onnx", 2**21), ("heads.safetensors", 2**29)]
)
def test_files_of_adapters_are_listed_and_have_a_largest_size(file: str, limit: int) -> None:
    fields = changed("adapters", ADAPTERS)
    fields["files"] = FILES | ADAPTER_FILES | {file: STORED | {"size": limit}}
    Manifest.model_validate(fields)
    fields["files"] |= {file: STORED | {"size": limit + 1}}
    with pytest.raises(ValueError, match=f"the file '{file}' has {limit + 1} bytes"):
        Manifest.model_validate(fields)
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


def test_a_bundle_has_at_most_64_files() -> None:
    many = {f"f{n}": STORED for n in range(61)}
    assert accepts("files", FIELDS["files"] | many)
    assert not accepts("files", FIELDS["files"] | many | {"one-more": STORED})


def test_the_precision_of_a_graph_is_that_of_its_section() -> None:
    assert not accepts("graph.precision", "int8")
    fields = changed("fp16", INT8)
    fields["files"] = FILES
    with pytest.raises(ValueError, match=r"the graph g8.onnx is int8, but its section is fp16"):
        Manifest.model_validate(fields)
    assert manifest().graph_of(Precision.FP32) == manifest().graph
    assert manifest().graph_of(Precision.INT8) is None


@pytest.mark.parametrize(
    ("measured", "passed"), [({"cosine": 0.9}, True), ({"cosine": 0.89}, False), ({}, False), ({"cosine": float("nan")}, False)]
)  # fmt: skip
def test_a_gate_is_passed(measured: dict, passed: bool) -> None:
    assert accepts("gate", {"measured": measured, "limits": {"cosine": 0.9}}) is passed


def test_tasks_have_what_they_need() -> None:
    tasks = FIELDS["tasks"]
    for wrong, message in (
        ([*tasks, tasks[0]], "is named twice"),
        ([*tasks, "no-such-task"], "no-such-task"),
        ([], "at least 1"),
        ([task for task in tasks if task != "embed"], "embed and the section embedding"),
    ):
        with pytest.raises(ValueError, match=message):
            Manifest.model_validate(changed("tasks", wrong))
    with pytest.raises(ValueError, match="embed and the section embedding come together"):
        Manifest.model_validate(changed("embedding", None))
    with pytest.raises(ValueError, match="fill-mask needs a mask token"):
        Manifest.model_validate(
            changed("tokenizer", FIELDS["tokenizer"] | {"mask_id": None, "mask_token": None})
        )
    with pytest.raises(
        ValueError, match=r"text-classification and the section heads.sequence_class"
    ):
        Manifest.model_validate(changed("heads", {"token_classification": {"labels": LABELS}}))
    for heads in ({"no_head": {}}, {"embedding": {}}):
        with pytest.raises(ValueError, match="has options"):
            Manifest.model_validate(changed("heads", FIELDS["heads"] | heads))
    assert not accepts("heads.token_classification", {"labels": []})
    assert not accepts(
        "heads.sequence_classification", {"labels": [], "problem_type": "regression"}
    )
    assert not accepts("heads.sequence_classification", {"labels": ["a"], "problem_type": "other"})


def test_a_mask_has_an_id_and_a_token() -> None:
    for half in ("mask_id", "mask_token"):
        with pytest.raises(ValueError, match="mask_id and mask_token come together"):
            Manifest.model_validate(changed(f"tokenizer.{half}", None))


def test_tables_are_those_of_the_architecture() -> None:
    sizes = FIELDS["architecture"]
    words = {WORD_TABLE: [sizes["vocab_size"], 8]}
    positions = {POSITION_TABLE: [sizes["max_positions"], 8]}
    assert accepts("tables", words)
    assert accepts("tables", words | positions)
    assert not accepts("tables", positions)
    assert not accepts("tables", words | {POSITION_TABLE: [sizes["max_positions"] + 1, 8]})


def test_a_default_prompt_is_one_of_the_prompts() -> None:
    assert accepts("embedding.default_prompt", "query")
    assert not accepts("embedding.default_prompt", "other")


def test_the_specification_of_a_graph_follows_from_the_manifest() -> None:
    spec = manifest().graph_spec(Layout.PACKED)
    assert (spec.layout, spec.token_types, spec.layers) == (Layout.PACKED, True, 4)
    assert str(spec.pooling) == "mean"
    assert spec.heads == tuple(head.name for head in manifest().graph_heads)
    no_types = Manifest.model_validate(changed("architecture.type_vocab_size", 0))
    assert no_types.graph_spec(Layout.DENSE).token_types is False
    assert spec.include_prompt
    without_prompts = Manifest.model_validate(changed("embedding.include_prompt", False))
    assert not without_prompts.graph_spec(Layout.DENSE).include_prompt
    only_qa = changed("tasks", ["qa"]) | {"embedding": None, "heads": {}}
    assert Manifest.model_validate(only_qa).graph_spec(Layout.DENSE).pooling is None


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
    for path in ("architecture.other", "parity.other", "more"):
        assert not accepts(path, 1)


def test_the_shipped_bundles_keep_their_digests() -> None:
    store = Store(DEFAULT_ROOT)
    for name in SHIPPED_NAMES:
        bundle = store.open(name)
        recorded = json.loads(bundle.file("manifest.json").read_text())["digest"]
        assert bundle.manifest.digest == recorded


def test_a_manifest_comes_back_from_its_bytes_only() -> None:
    data = manifest().to_bytes()
    assert Manifest.from_bytes(data) == manifest()
    assert manifest().digest in data.decode()
    assert manifest().reference == "tiny@3"
    with pytest.raises(ValueError, match="digest does not match"):
        Manifest.from_bytes(data.replace(b'"tiny"', b'"tinx"'))
    with pytest.raises(ValueError, match="schema_version is 2; this release reads 1"):
        Manifest.from_bytes(data.replace(b'"schema_version": 1', b'"schema_version": 2'))
    with pytest.raises(ValueError, match="schema_version is None"):
        Manifest.from_bytes(b"{}")
    with pytest.raises(ValueError, match="a manifest is a JSON object"):
        Manifest.from_bytes(b"[]")
    with pytest.raises(ValueError, match="it is not JSON"):
        Manifest.from_bytes(b"{")
    with pytest.raises(ValueError, match="nested too deeply"):
        Manifest.from_bytes(b'{"a":' * 100_000)


def written(path: str, value: Any) -> dict[str, Any]:
    """Return what a manifest with another value at a path has as JSON."""
    body: dict[str, Any] = json.loads(Manifest.model_validate(changed(path, value)).to_bytes())
    return body


def test_fields_that_earlier_releases_do_not_know_are_written_only_with_a_value() -> None:
    assert "further_poolings" not in written("version", 3)["embedding"]
    joined = written("embedding.further_poolings", ["cls"])
    assert joined["embedding"]["further_poolings"] == ["cls"]
    read = Manifest.from_bytes(json.dumps(joined, indent=2).encode() + b"\n")
    assert read.embedding is not None
    assert read.embedding.poolings == (Pooling.MEAN, Pooling.CLS)
    assert "tables" not in written("tables", None)
    unknown = written("tokenizer.second_type", None)["tokenizer"]
    assert not {"second_type", "pair_separators"} & unknown.keys()
    assert {"second_type", "pair_separators"} <= written("tokenizer.second_type", 0)[
        "tokenizer"
    ].keys()
    for side, is_written in (("right", False), ("left", True)):
        said = written("tokenizer.truncation_side", side)["tokenizer"]
        assert ("truncation_side" in said) is is_written
        assert "second_type" not in said
    head = "sequence_classification"
    assert "raw_scores" not in written("version", 3)["heads"][head]
    raw = written(f"heads.{head}.raw_scores", True)
    assert raw["heads"][head]["raw_scores"] is True
    read = Manifest.from_bytes(json.dumps(raw, indent=2).encode() + b"\n")
    assert read.heads[head].raw_scores  # type: ignore[attr-defined]
    labelled = {"sequence_classification", "token_classification"}
    without = [task for task in FIELDS["tasks"] if "classification" not in task]
    bare = Manifest.model_validate(FIELDS | {"tasks": without, "heads": {}})
    assert labelled & FIELDS["heads"].keys()
    assert "heads" not in json.loads(bare.to_bytes())


def test_a_bundle_may_have_a_threshold_of_no_answer() -> None:
    assert "span" not in FIELDS["heads"], "those of earlier releases have none"
    for threshold in (-2.5, 0, 1000):
        assert accepts("heads.span", {"no_answer_threshold": threshold})
    for threshold in (float("nan"), float("inf"), -1001, None):
        assert not accepts("heads.span", {"no_answer_threshold": threshold})
    assert not accepts("heads.span", {"threshold": 1})
