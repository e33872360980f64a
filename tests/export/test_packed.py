"""The packed layout: its meaning, by the reference and, with a GPU, by the kernels; its inputs;
what a bundle keeps of it.
"""

import json
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from cloze.cli import cli
from cloze.export.check.verify import GraphUnderTest, verify
from cloze.export.errors import ExportError
from cloze.export.graph.session import CUDA, Session, open_session
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.model import GraphWriter
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Precision, Weights
from cloze.service.core import Device
from cloze.service.engine.onnx_engine import OnnxEngine
from tests.support.tiny import SHAPES, name_of, save_checkpoint

CASES = [
    pytest.param(kind, sizes, id=name_of(kind, sizes))
    for kind, shapes in SHAPES.items()
    for sizes in shapes
]


@pytest.fixture(scope="module")
def bert(checkpoints: dict[str, Path]) -> Checkpoint:
    return load_checkpoint(str(checkpoints["bert"]))


def open_packed(file: Path, cuda: bool) -> Session:
    return open_session(file, Layout.PACKED, cuda=cuda)


def writer_of(checkpoint: Checkpoint, folder: Path) -> GraphWriter:
    return GraphWriter(checkpoint.model, checkpoint.recipe, checkpoint.default_heads, folder)


@pytest.mark.parametrize(("kind", "sizes"), CASES)
def test_every_head_agrees_with_torch(
    kind: str, sizes: dict[str, object], on_cuda: bool, tmp_path: Path
) -> None:
    """Over the grid, sequences of unlike lengths in one batch, all heads in it, each alone, and
    none.
    """
    checkpoint = load_checkpoint(str(save_checkpoint(tmp_path / "checkpoint", kind, **sizes)))
    graph = writer_of(checkpoint, tmp_path).write(Precision.FP16)
    assert (graph.layout, graph.precision) == (Layout.PACKED, Precision.FP16)
    subject = GraphUnderTest(graph, checkpoint, checkpoint.default_heads, 160)
    parity = verify(tmp_path, subject, open_packed(tmp_path / graph.file, on_cuda))
    assert 0 < max(parity.max_error.values()) < 0.01, "fp16 rounds, but not more than this"


def test_the_graph_is_what_the_fast_kernels_take(bert: Checkpoint, tmp_path: Path) -> None:
    graph = writer_of(bert, tmp_path).write(Precision.FP16)
    layers = bert.model.config.layers
    assert graph.operators["PackedMultiHeadAttention"] == layers
    assert graph.operators["SkipLayerNormalization"] == 2 * layers + 1
    assert not graph.operators.keys() & {
        "Shape",
        "Range",
        "NonZero",
        "Where",
        "Loop",
        "If",
        "Reshape",
    }, "these need the host"
    for node in onnx.load(tmp_path / graph.file).graph.node:
        if node.op_type == "PackedMultiHeadAttention":
            query, key, value, bias, *_ = node.input
            assert len({query, key, value}) == 3
            assert bias == ""
    kept = {t.name: t.data_type for t in onnx.load(tmp_path / graph.file).graph.initializer}
    encoder = [kind for name, kind in kept.items() if name.startswith("layers.")]
    assert len(encoder) == 14 * layers  # six matrices, two biases, two norms of three vectors
    assert set(encoder) == {TensorProto.FLOAT16}


@pytest.mark.parametrize("weights", list(Weights))
def test_a_bundle_holds_every_weight_once(
    weights: Weights, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """And all three graphs are verified, and one of them serves on a CPU as before."""
    precisions = (Precision.INT8, Precision.FP16)
    options = ExportOptions(precisions=precisions, weights=weights)
    bundle = export(str(checkpoints["distilbert"]), "d", Store(tmp_path), options)
    manifest = bundle.manifest
    assert manifest.fp16 is not None
    assert tuple(lower.graph.precision for lower in manifest.lower_precisions()) == precisions
    assert manifest.graph_of(Precision.FP16) == manifest.fp16.graph
    assert manifest.fp16.gate.measured["fill_mask_top1_agreement"] >= 0.95
    sizes = {name: file.size for name, file in manifest.files.items() if name.endswith(".bin")}
    matrices = 2 * 12 * 64 * 64  # bytes of a layer's matrices in fp16, of which there are two
    own = sizes.get("weights-fp16.bin", 0)
    assert (own > matrices) == (weights is Weights.FP32), (
        "else its matrices are those of the other graphs"
    )
    assert OnnxEngine(bundle, Device.CPU).precision == "fp32"


def test_the_command_shows_a_graph_in_fp16(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from click.testing import CliRunner

    common = ["export", str(checkpoints["bert-qa"]), "--name", "q", "--model-store", str(tmp_path)]
    result = CliRunner().invoke(cli, [*common, "--precision", "fp16", "--task", "qa"])
    assert result.exit_code == 0, result.output
    assert "fp16 beside the checkpoint: qa_span_agreement" in result.output
    shown = CliRunner().invoke(cli, ["store", "show", "q", "--model-store", str(tmp_path)])
    graph = json.loads(shown.output)["fp16"]["graph"]
    assert (graph["layout"], graph["precision"]) == ("packed", "fp16")


def test_kernels_that_are_not_there_are_not_replaced_silently(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Where CUDA was asked for to check a graph, the reference does not stand in; nothing is
    published.
    """
    if CUDA in ort.get_available_providers():
        pytest.skip("this onnxruntime runs on CUDA")
    store = Store(tmp_path)
    with pytest.raises(ExportError, match="CUDA was asked for, but this onnxruntime"):
        options = ExportOptions(precisions=(Precision.FP16,), cuda=True)
        export(str(checkpoints["bert-qa"]), "q", store, options)
    assert not store.references()
