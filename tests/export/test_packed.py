"""The packed layout: its meaning, by the reference and, with a GPU, by the kernels; its inputs;
what a bundle keeps of it.
"""

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from cloze.export.check.verify import GraphUnderTest, verify
from cloze.export.errors import ExportError
from cloze.export.graph.session import CUDA, open_session
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.model import GraphWriter
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Precision
from tests.support.tiny import SHAPES, name_of, save_checkpoint

CASES = [
    pytest.param(kind, sizes, id=name_of(kind, sizes))
    for kind, shapes in SHAPES.items()
    for sizes in shapes
]


def writer_of(checkpoint: Checkpoint, folder: Path) -> GraphWriter:
    return GraphWriter(checkpoint.model, checkpoint.recipe, checkpoint.default_heads, folder)


@pytest.mark.parametrize(("kind", "sizes"), CASES)
@pytest.mark.gpu
def test_every_head_agrees_with_torch_on_a_gpu(
    kind: str, sizes: dict[str, object], tmp_path: Path
) -> None:
    """The reference of CUDA's kernels agrees in `tests/unit/export/graph`."""
    checkpoint = load_checkpoint(str(save_checkpoint(tmp_path / "checkpoint", kind, **sizes)))
    graph = writer_of(checkpoint, tmp_path).write(Precision.FP16)
    subject = GraphUnderTest(graph, checkpoint, checkpoint.default_heads, 160)
    session = open_session(tmp_path / graph.file, Layout.PACKED, cuda=True)
    parity = verify(tmp_path, subject, session)
    assert 0 < max(parity.max_error.values()) < 0.01, "fp16 rounds, but not more than this"


def test_the_graph_is_what_the_fast_kernels_take(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    bert = load_checkpoint(str(checkpoints["bert"]))
    graph = writer_of(bert, tmp_path).write(Precision.FP16)
    layers = bert.model.config.layers
    assert graph.operators["PackedMultiHeadAttention"] == layers
    assert graph.operators["SkipLayerNormalization"] == 2 * layers + 1
    on_the_host = {"Shape", "Range", "NonZero", "Where", "Loop", "If", "Reshape"}
    assert not graph.operators.keys() & on_the_host
    for node in onnx.load(tmp_path / graph.file).graph.node:
        if node.op_type == "PackedMultiHeadAttention":
            query, key, value, bias, *_ = node.input
            assert len({query, key, value}) == 3
            assert bias == ""
    kept = {t.name: t.data_type for t in onnx.load(tmp_path / graph.file).graph.initializer}
    encoder = [kind for name, kind in kept.items() if name.startswith("layers.")]
    assert len(encoder) == 14 * layers  # six matrices, two biases, two norms of three vectors
    assert set(encoder) == {TensorProto.FLOAT16}


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
