"""Graphs of exported checkpoints: what the runtimes make of them, and how their weights are stored.

`tests/unit/export/graph` compares the graphs of all families, heads and precisions with torch.
"""

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import GraphProto, TensorProto

from cloze.export.check.rounding import input_scales, round_weights
from cloze.export.check.verify import GraphUnderTest, verify
from cloze.export.errors import ExportError
from cloze.export.graph.session import CUDA, open_session
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.model import GraphWriter
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Manifest, Precision, Weights
from tests.conftest import has_gpu
from tests.support.tiny import save_checkpoint
from tests.support.vocabulary import vocabulary


@pytest.fixture
def bert(checkpoints: dict[str, Path]) -> Checkpoint:
    return load_checkpoint(str(checkpoints["bert"]))


def writer_of(checkpoint: Checkpoint, folder: Path) -> GraphWriter:
    return GraphWriter(checkpoint.model, checkpoint.recipe, checkpoint.default_heads, folder)


def as_opened(file: Path) -> GraphProto:
    """Return the graph that onnxruntime makes of a file."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(file.with_name("opened.onnx"))
    options.log_severity_level = 3
    ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return onnx.load(str(file.with_name("opened.onnx"))).graph


def test_the_runtime_does_not_fuse_what_is_slower_fused(bert: Checkpoint, tmp_path: Path) -> None:
    """See `TrunkGraph` for the times."""
    graph = writer_of(bert, tmp_path).write()
    nodes = [node.op_type for node in as_opened(tmp_path / graph.file).node]
    assert nodes.count("LayerNormalization") == 2 * bert.model.config.layers + 2
    assert "SkipLayerNormalization" not in nodes


def test_the_runtime_computes_no_table_of_floats_for_the_int8_graph(
    bert: Checkpoint, tmp_path: Path
) -> None:
    """With BERT's vocabulary, 384 wide, a table of floats takes 47 MB per model."""
    model, recipe = bert.model, bert.recipe
    scales = input_scales(model, bert.tokenizer)
    round_weights(model, recipe, Weights.INT8, scales)
    writer = GraphWriter(model, recipe, bert.default_heads, tmp_path, Weights.INT8, scales)
    opened = as_opened(tmp_path / writer.write(Precision.INT8).file)
    table = sorted(model.encoder.embeddings.word.weight.shape)
    kinds = {node.data_type for node in opened.initializer if sorted(node.dims) == table}
    assert kinds == {TensorProto.INT8}


def test_the_packed_graph_is_what_the_fast_kernels_take(bert: Checkpoint, tmp_path: Path) -> None:
    graph = writer_of(bert, tmp_path).write(Precision.FP16)
    layers = bert.model.config.layers
    assert graph.operators["PackedMultiHeadAttention"] == layers
    assert graph.operators["SkipLayerNormalization"] == 2 * layers + 1
    on_the_host = {"Shape", "Range", "NonZero", "Where", "Loop", "If", "Reshape"}
    assert not graph.operators.keys() & on_the_host
    loaded = onnx.load(tmp_path / graph.file).graph
    for node in loaded.node:
        if node.op_type == "PackedMultiHeadAttention":
            query, key, value, bias, *_ = node.input
            assert len({query, key, value}) == 3
            assert bias == ""
    encoder = [t.data_type for t in loaded.initializer if t.name.startswith("layers.")]
    assert len(encoder) == 14 * layers  # six matrices, two biases, two norms of three vectors
    assert set(encoder) == {TensorProto.FLOAT16}


@pytest.mark.parametrize("kind", ["bert", "bert-qa", "distilbert", "distilbert-qa"])
@pytest.mark.gpu
def test_every_head_agrees_with_torch_on_a_gpu(kind: str, tmp_path: Path) -> None:
    if not has_gpu():
        pytest.skip("no GPU: its driver (libcuda.so.1) is not there or finds none")
    checkpoint = load_checkpoint(str(save_checkpoint(tmp_path / "checkpoint", kind)))
    graph = writer_of(checkpoint, tmp_path).write(Precision.FP16)
    subject = GraphUnderTest(graph, checkpoint, checkpoint.default_heads, 160)
    session = open_session(tmp_path / graph.file, Layout.PACKED, cuda=True)
    parity = verify(tmp_path, subject, session)
    assert 0 < max(parity.max_error.values()) < 0.01, "fp16 rounds, but not more than this"


def test_kernels_that_are_not_there_are_not_replaced_silently(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Where CUDA was asked for, the reference does not stand in; nothing is published."""
    if CUDA in ort.get_available_providers():
        pytest.skip("this onnxruntime runs on CUDA")
    store, options = Store(tmp_path), ExportOptions(precisions=(Precision.FP16,), cuda=True)
    with pytest.raises(ExportError, match="CUDA was asked for, but this onnxruntime"):
        export(str(checkpoints["bert-qa"]), "q", store, options)
    assert not store.references()


def weight_bytes(manifest: Manifest) -> int:
    return sum(file.size for name, file in manifest.files.items() if name.endswith(".bin"))


def test_fp16_halves_the_bytes(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """What is published has passed parity with torch on the rounded weights, at fp32's tolerance."""
    store, source = Store(tmp_path), str(checkpoints["bert"])
    fp32 = export(source, "fp32", store).manifest
    fp16 = export(source, "fp16", store, ExportOptions(weights=Weights.FP16)).manifest
    assert fp16.graph.weights is Weights.FP16
    assert fp16.parity.tolerance == fp32.parity.tolerance
    # Pages, and vectors that stay fp32, count: the models are tiny.
    assert weight_bytes(fp16) < 0.7 * weight_bytes(fp32)
    with pytest.raises(ExportError, match="ask for --precision int8 as well"):
        export(source, "int8", store, ExportOptions(weights=Weights.INT8))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_bert_large_exports_past_the_protobuf_limit(tmp_path: Path) -> None:
    """335 M parameters and a vocabulary that brings the weights over 2 GB."""
    sizes = {
        "vocab_size": 240_000, "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 512,
    }  # fmt: skip
    folder = save_checkpoint(tmp_path / "large", "bert", **sizes)
    pieces = vocabulary() + [f"word{number}" for number in range(240_000 - len(vocabulary()))]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    bundle = export(str(folder), "large", Store(tmp_path / "store"))
    assert bundle.manifest.files["weights.bin"].size > 2**31
    assert bundle.manifest.graph.operators["MultiHeadAttention"] == 24
