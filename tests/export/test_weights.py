"""How weights lie on disk: fp16 and int8 are smaller, and what they stand for is what both graphs
compute with.
"""

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from cloze.export.check.rounding import input_scales, round_weights
from cloze.export.errors import ExportError
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.model import GraphWriter
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.manifest import Manifest, Precision, Weights

KINDS = ("bert", "bert-qa", "distilbert")


def weight_bytes(manifest: Manifest) -> int:
    return sum(file.size for name, file in manifest.files.items() if name.endswith(".bin"))


def test_fp16_halves_the_bytes(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """What is published has passed parity with torch on the rounded weights, at fp32's tolerance."""
    store, source = Store(tmp_path), str(checkpoints["bert"])
    fp32 = export(source, "fp32", store).manifest
    fp16 = export(source, "fp16", store, ExportOptions(weights=Weights.FP16)).manifest
    assert fp16.graph.weights is Weights.FP16
    assert fp16.parity.tolerance == fp32.parity.tolerance
    assert weight_bytes(fp16) < 0.7 * weight_bytes(
        fp32
    )  # pages, and vectors that stay fp32: the models are tiny


@pytest.mark.parametrize("kind", KINDS)
def test_the_runtime_computes_no_table_of_floats_for_the_int8_graph(
    kind: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """With BERT's vocabulary, 384 wide, a table of floats takes 47 MB per model."""
    checkpoint = load_checkpoint(str(checkpoints[kind]))
    model, recipe = checkpoint.model, checkpoint.recipe
    scales = input_scales(model, checkpoint.tokenizer)
    round_weights(model, recipe, Weights.INT8, scales)
    heads = checkpoint.default_heads
    writer = GraphWriter(model, recipe, heads, tmp_path, Weights.INT8, scales)
    graph = writer.write(Precision.INT8)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "opened.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(tmp_path / graph.file, options, providers=["CPUExecutionProvider"])
    opened = onnx.load(str(tmp_path / "opened.onnx")).graph
    table = sorted(model.encoder.embeddings.word.weight.shape)
    kinds = {node.data_type for node in opened.initializer if sorted(node.dims) == table}
    assert kinds == {onnx.TensorProto.INT8}


def test_int8_weights_need_the_int8_graph(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(
        ExportError,
        match="weights int8 are those of the int8 graph: ask for --precision int8 as well",
    ):
        export(
            str(checkpoints["bert"]), "bert", Store(tmp_path), ExportOptions(weights=Weights.INT8)
        )
