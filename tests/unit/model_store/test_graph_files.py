"""ONNX files and golden files of strangers: what is read, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cloze.model_store import Bundle
from cloze.model_store.goldens import read_goldens
from cloze.model_store.graph_checks import (
    _check_operators,
    _check_places,
    _check_tables,
    _check_tensors,
    expected_tensors,
)
from cloze.model_store.layouts import Layout
from cloze.model_store.onnx_file import DeclaredTensor, DeclaredWeight, OnnxGraph, parse_onnx
from cloze.model_store.protobuf import Field, Message, Wire
from tests.support.refusals import check_table
from tests.support.task_model import VOCABULARY, manifest

FIELDS = {
    1: Field("number", Wire.INTEGER),
    2: Field("text"),
    3: Field("numbers", Wire.INTEGER, repeated=True),
    4: Field("parts", repeated=True),
    5: Field("short", Wire.FIXED32),
    6: Field("long", Wire.FIXED64),
    7: Field("forbidden things", refused=True),
}


def message(*data: int) -> Message:
    return Message("test", memoryview(bytes(data)), FIELDS)


def test_integers_of_any_size() -> None:
    assert message(0x08, 0x05).integer("number") == 5
    assert message(0x08, 0xAC, 0x02).integer("number") == 300
    assert message(0x08, 0x7F).integer("number") == 127
    assert message(0x08, 0x80, 0x01).integer("number") == 128
    assert message(0x08, *[0xFF] * 9, 0x01).integer("number") == -1
    assert message(0x08, *[0x80] * 9, 0x01).integer("number") == -(2**63)
    assert message(0x08, *[0xFF] * 8, 0x7F).integer("number") == 2**63 - 1
    assert message().integer("number") == 0
    assert message(0x1A, 3, 1, 0x80, 1).integers("numbers") == [1, 128]
    assert message(0x18, 1, 0x18, 2).integers("numbers") == [1, 2]
    assert message(0x1A, 0).integers("numbers") == []


def test_texts_parts_and_fixed_numbers() -> None:
    assert message(0x12, 2, 0x68, 0x69).text("text") == "hi"
    assert message().text("text") == ""
    assert [bytes(p) for p in message(0x22, 1, 65, 0x22, 0).parts("parts")] == [b"A", b""]
    assert [bytes(p) for p in message(0x2D, 1, 2, 3, 4).parts("short")] == [bytes([1, 2, 3, 4])]
    assert len(message(0x31, *range(8)).parts("long")[0]) == 8
    assert "short" in message(0x2D, 1, 2, 3, 4)
    assert "short" not in message()


def model(change: Callable[[onnx.ModelProto], Any] = lambda _: None) -> bytes:
    """Return a graph of one node with a weight inside and a weight outside the file."""
    inside = helper.make_tensor("inside", TensorProto.FLOAT16, [2, 3], bytes(12), raw=True)
    outside = TensorProto(name="outside", data_type=TensorProto.INT8, dims=[4, 5], data_location=1)
    for key, value in (("location", "w.bin"), ("offset", "64"), ("length", "20")):
        outside.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("BiasGelu", ["x", "inside"], ["y"], domain="com.microsoft", axis=1)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.INT32, ["B", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
        [inside, outside],
    )
    made = helper.make_model(graph)
    change(made)
    return made.SerializeToString()


def test_what_a_graph_declares() -> None:
    graph = parse_onnx(model())
    assert graph.operators == {("com.microsoft", "BiasGelu")}
    assert graph.inputs == {"x": DeclaredTensor(np.dtype("int32"), (None, 3))}
    assert graph.outputs == {"y": DeclaredTensor(np.dtype("float32"), ())}
    assert graph.weights == {
        "inside": DeclaredWeight((2, 3), 12),
        "outside": DeclaredWeight((4, 5), 20, "w.bin", 64),
    }


def weight(**fields: Any) -> Callable[[onnx.ModelProto], None]:
    def change(made: onnx.ModelProto) -> None:
        first = made.graph.initializer[0]
        for name, value in fields.items():
            if name == "dims":
                first.ClearField("dims")
                first.dims.extend(value)
            else:
                setattr(first, name, value)

    return change


def place(
    index: int, key: str | None = None, value: str | None = None
) -> Callable[[onnx.ModelProto], None]:
    def change(made: onnx.ModelProto) -> None:
        entry = made.graph.initializer[1].external_data[index]
        entry.key = entry.key if key is None else key
        entry.value = entry.value if value is None else value

    return change


def test_a_graph_has_operators_of_known_domains() -> None:
    def of(*operators: tuple[str, str]) -> OnnxGraph:
        return OnnxGraph(frozenset(operators), {}, {}, {})

    _check_operators(of(("", "MatMul"), ("com.microsoft", "BiasGelu")))
    with pytest.raises(ValueError, match=r"the operator 'Evil' has the domain 'ai.other'"):
        _check_operators(of(("", "MatMul"), ("ai.other", "Evil")))


def test_weights_lie_inside_their_files_and_do_not_overlap() -> None:
    def check(*weights: DeclaredWeight) -> None:
        named = {str(n): one for n, one in enumerate(weights)}
        _check_places(named, {"w.bin": 100, "g.onnx": 100}, most_names=2)

    def at(offset: int, size: int, file: str | None = "w.bin") -> DeclaredWeight:
        return DeclaredWeight((size,), size, file, offset)

    check(at(0, 40), at(40, 60), at(0, 1000, None), at(40, 60), at(0, 40))
    with pytest.raises(ValueError, match=r"the weight '0' needs 101 bytes of w.bin, which has 100"):
        check(at(61, 40))
    with pytest.raises(ValueError, match="the weight '1' needs 110 bytes"):
        check(at(0, 60), at(0, 50))
    with pytest.raises(ValueError, match="the weight '2' lies where 2 others lie"):
        check(at(0, 60), at(0, 60), at(0, 60))
    for file in ("other.bin", "g.onnx"):
        with pytest.raises(ValueError, match="which is not one of the bundle's files of weights"):
            check(at(0, 1, file))


def test_a_graph_has_the_tensors_of_its_tasks() -> None:
    expected = expected_tensors(manifest(), Layout.DENSE)
    assert str(expected.inputs["input_ids"]) == "int32 [*, *]"
    assert str(expected.outputs["embeddings"]) == "float32 [*, 4]"
    assert str(expected.outputs["class_logits"]) == "float32 [*, 4]"
    assert str(expected.outputs["token_embeddings"]) == "float32 [*, 4]"
    assert str(expected.inputs["layer_weights"]) == "float32 [*, 5]"
    assert "position_ids" not in expected.inputs
    packed = expected_tensors(manifest(), Layout.PACKED).inputs
    assert str(packed["input_ids"]) == "int32 [*]"
    assert {"position_ids", "cu_seqlens", "token_offset", "pool_rows"} <= packed.keys()
    named = expected.outputs.items()
    good = {name: DeclaredTensor(t.spec.numpy_dtype, t.shape) for name, t in named}
    _check_tensors("output", good, expected.outputs)
    free = good | {"embeddings": DeclaredTensor(np.dtype("float32"), (None, None))}
    _check_tensors("output", free, expected.outputs)
    for dtype, shape in (
        ("float16", (None, 4)),
        ("float32", (None, 5)),
        ("float32", (None,)),
        ("float32", (None, 4, None)),
        ("float32", (3, 4)),
    ):
        wrong = good | {"embeddings": DeclaredTensor(np.dtype(dtype), shape)}
        with pytest.raises(ValueError, match="the output embeddings is float"):
            _check_tensors("output", wrong, expected.outputs)
    vectors = good.pop("embeddings")
    with pytest.raises(ValueError, match="lacks the output 'embeddings'"):
        _check_tensors("output", good, expected.outputs)
    with pytest.raises(ValueError, match="the graph has the output 'more'"):
        _check_tensors(
            "output", good | dict.fromkeys(("embeddings", "more"), vectors), expected.outputs
        )


def test_tables_have_the_rows_of_the_manifest() -> None:
    def tables(**changes: tuple[int, int] | None) -> dict[str, DeclaredWeight]:
        sizes = {"word": len(VOCABULARY), "position": 16, "token_type": 2}
        shapes: dict[str, Any] = {name: (rows, 4) for name, rows in sizes.items()} | changes
        return {f"embeddings.{n}": DeclaredWeight(one, 1) for n, one in shapes.items() if one}

    _check_tables(tables(), manifest())
    for ending in (".fp16", ".int8"):
        weights = {name + ending: stored for name, stored in tables().items()}
        _check_tables(weights, manifest())
    for name, shape in (("word", (5, 4)), ("position", (17, 4)), ("token_type", (2, 5))):
        with pytest.raises(ValueError, match=f"the weight 'embeddings.{name}' is"):
            _check_tables(tables(**{name: shape}), manifest())
    for name in ("word", "position", "token_type"):
        with pytest.raises(ValueError, match=f"the graph lacks the weight 'embeddings.{name}'"):
            _check_tables(tables(**{name: None}), manifest())
    architecture = manifest().architecture.model_dump() | {"type_vocab_size": 0}
    _check_tables(tables(token_type=None), manifest(architecture=architecture))


QA: dict[str, Any] = {"tasks": ["qa"], "embedding": None, "heads": {}}
CASE: dict[str, Any] = {
    "feeds": {"input_ids": [[1, 2]], "token_type_ids": [[0, 1]]},
    "outputs": {"span_logits": [[0.5, 1], [2, 3]]},
}


def goldens(folder: Path, content: object) -> Any:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "golden.json").write_text(text)
    return read_goldens(Bundle(manifest(**QA), folder), "golden.json", Layout.DENSE)


def with_feed(**feeds: Any) -> dict[str, Any]:
    return CASE | {"feeds": CASE["feeds"] | feeds}


def test_golden_cases_are_arrays_of_the_graph_s_types(tmp_path: Path) -> None:
    (golden,) = goldens(tmp_path, [CASE])
    assert golden.feeds["input_ids"].dtype == np.int32
    assert golden.feeds["token_type_ids"].tolist() == [[0, 1]]
    assert golden.outputs["span_logits"].dtype == np.float32
    assert golden.outputs["span_logits"].tolist() == [[0.5, 1], [2, 3]]
    assert len(goldens(tmp_path, [CASE] * 16)) == 16
    largest = [[1] * 64] * 64
    assert goldens(tmp_path, [with_feed(input_ids=largest)])[0].feeds["input_ids"].size == 4096


NAMES = {
    "message": message, "model": model, "weight": weight, "place": place, "np": np, "onnx": onnx,
    "CASE": CASE, "with_feed": with_feed,
}  # fmt: skip


def test_files_that_no_bundle_may_have(tmp_path: Path) -> None:
    """`strangers.txt` has a reader, what it reads in Python, and the refusal per line."""

    def outcome(reader: str, read: str) -> str:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            content = eval(read, NAMES)
            if reader == "graph":
                parse_onnx(content)
            if reader == "golden file":
                goldens(tmp_path, content)
        return str(error.value).replace(str(tmp_path), "FOLDER").replace(" | ", " or ")

    check_table(Path(__file__).with_name("strangers.txt"), outcome)
