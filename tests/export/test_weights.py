"""How weights lie on disk: fp16 and int8 are smaller, and what they stand for is what both graphs
compute with.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.export.check.rounding import input_scales, round_weights
from cloze.export.check.verify import GraphUnderTest, verify
from cloze.export.errors import ExportError
from cloze.export.graph.linear_ops import quantise
from cloze.export.graph.session import open_session
from cloze.export.heads import EMBEDDING, NEXT_SENTENCE, SPAN
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.measure.scorer import (
    GraphScorer,
    head_arrays,
)
from cloze.export.model import GraphWriter
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.manifest import Manifest, Precision, Weights

KINDS = ("bert", "bert-qa", "distilbert")


def weight_bytes(manifest: Manifest) -> int:
    return sum(file.size for name, file in manifest.files.items() if name.endswith(".bin"))


@pytest.mark.parametrize("kind", KINDS)
def test_each_halves_the_bytes(kind: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """What is published has passed parity with torch on the rounded weights, at fp32's tolerance."""
    store = Store(tmp_path)
    fp32 = export(str(checkpoints[kind]), "fp32", store).manifest
    fp16 = export(
        str(checkpoints[kind]), "fp16", store, ExportOptions(weights=Weights.FP16)
    ).manifest
    assert fp16.graph.weights is Weights.FP16
    assert fp16.parity.tolerance == fp32.parity.tolerance
    assert weight_bytes(fp16) < 0.7 * weight_bytes(
        fp32
    )  # pages, and vectors that stay fp32: the models are tiny


@pytest.mark.parametrize("kind", KINDS)
def test_int8_keeps_one_copy_for_both_graphs(
    kind: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Of a random model; the gate, which compares first choices, is for models whose choices are
    none by a hair.
    """
    checkpoint = load_checkpoint(str(checkpoints[kind]))
    model, recipe, heads = checkpoint.model, checkpoint.recipe, checkpoint.default_heads
    (tmp_path / "fp32").mkdir()
    GraphWriter(model, recipe, heads, tmp_path / "fp32").write()
    scales = input_scales(model, checkpoint.tokenizer)
    round_weights(model, recipe, Weights.INT8, scales)
    folder = tmp_path / "int8"
    folder.mkdir()
    writer = GraphWriter(model, recipe, heads, folder, Weights.INT8, scales)
    fp32, int8 = writer.write(), writer.write(Precision.INT8)
    subjects = [GraphUnderTest(graph, checkpoint, heads, 64) for graph in (fp32, int8)]
    parity = verify(folder, subjects[0])
    assert max(parity.max_error.values()) <= parity.tolerance <= 1e-4
    assert [file.name for file in folder.glob("*.bin")] == ["weights.bin"], (
        "int8 has no weight that fp32 has not"
    )
    assert (folder / "weights.bin").stat().st_size < 0.55 * (
        tmp_path / "fp32" / "weights.bin"
    ).stat().st_size
    one, other = (
        GraphScorer(open_session(folder / subject.graph.file, subject.graph.layout), subject.spec)
        for subject in subjects
    )
    names = {head.name for head in heads}
    ids = np.random.default_rng(0).integers(5, checkpoint.tokenizer.size, (2, 12))
    for ask in (
        *([lambda scorer: head_arrays(scorer, "embedding", ids)] if EMBEDDING in names else []),
        *(
            [lambda scorer: head_arrays(scorer, "next_sentence", ids, np.zeros_like(ids))]
            if NEXT_SENTENCE in names
            else []
        ),
        *(
            [lambda scorer: head_arrays(scorer, "span", ids, np.zeros_like(ids))]
            if SPAN in names
            else []
        ),
    ):
        expected = ask(one)
        assert np.linalg.norm(ask(other) - expected) < 0.1 * np.linalg.norm(expected)


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


@pytest.mark.parametrize(
    ("weights", "smoothed"), [(Weights.FP16, False), (Weights.INT8, False), (Weights.INT8, True)]
)
@torch.no_grad()
def test_rounding_is_to_the_nearest_and_only_once(
    weights: Weights, smoothed: bool, checkpoints: dict[str, Path]
) -> None:
    checkpoint = load_checkpoint(str(checkpoints["bert"]))
    model, recipe = checkpoint.model, checkpoint.recipe
    scales = input_scales(model, checkpoint.tokenizer) if smoothed else {}
    before = [parameter.clone() for parameter in model.parameters()]
    round_weights(model, recipe, weights, scales)
    once = [parameter.clone() for parameter in model.parameters()]
    round_weights(model, recipe, weights, scales)
    moved = 0
    for original, first, second in zip(before, once, model.parameters(), strict=True):
        torch.testing.assert_close(
            first, second, rtol=1e-6 if weights is Weights.INT8 else 0, atol=0
        )
        moved += int(not torch.equal(original, first))
        if not smoothed:
            assert (original - first).abs().max() <= original.abs().max() / 250, (
                "half a step of 127, and fp16's"
            )
    assert moved, "something was rounded"


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 8), columns=st.integers(1, 8), seed=st.integers(0, 99))
def test_integers_of_what_integers_stand_for_are_the_same(
    rows: int, columns: int, seed: int
) -> None:
    """So that both graphs, each quantising the rounded model, find the same bytes."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    integers, steps = quantise(weight)
    again, _ = quantise(integers * steps[:, None])
    assert torch.equal(integers, again)
