"""The authored graph against transformers, which nobody here wrote: every head, several seeds,
sizes and shapes.
"""

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.model import GraphWriter
from cloze.export.publish import export
from cloze.model_store import Store
from tests.support.tiny import save_checkpoint
from tests.support.vocabulary import vocabulary


def test_the_runtime_does_not_fuse_what_is_slower_fused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """See `TrunkGraph` for the times."""
    checkpoint = load_checkpoint(str(checkpoints["bert"]))
    graph = GraphWriter(
        checkpoint.model, checkpoint.recipe, checkpoint.default_heads, tmp_path
    ).write()
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(tmp_path / graph.file, options, providers=["CPUExecutionProvider"])
    nodes = [
        node.op_type
        for node in onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph.node
    ]
    assert nodes.count("LayerNormalization") == 2 * checkpoint.model.config.layers + 2
    assert "SkipLayerNormalization" not in nodes


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_bert_large_exports_past_the_protobuf_limit(tmp_path: Path) -> None:
    """335 M parameters and a vocabulary that brings the weights over 2 GB."""
    folder = save_checkpoint(
        tmp_path / "large",
        "bert",
        vocab_size=240_000,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=512,
    )
    pieces = vocabulary() + [f"word{number}" for number in range(240_000 - len(vocabulary()))]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    bundle = export(str(folder), "large", Store(tmp_path / "store"))
    assert bundle.manifest.files["weights.bin"].size > 2**31
    assert bundle.manifest.graph.operators["MultiHeadAttention"] == 24
