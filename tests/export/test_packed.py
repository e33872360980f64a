"""The packed layout: its meaning, by the reference and, with a GPU, by the kernels; its inputs;
what a bundle keeps of it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from cloze.cli import cli
from cloze.export.check.verify import GraphUnderTest, verify
from cloze.export.errors import ExportError
from cloze.export.graph.builder import GraphBuilder
from cloze.export.graph.linear_ops import Fp32
from cloze.export.graph.session import CUDA, Session, open_session
from cloze.export.graph.trunk import PackedTrunk
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.model import GraphWriter
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store, tensors
from cloze.model_store.batch import placement_of
from cloze.model_store.heads import (
    Pooling,
    embedding,
    masked_lm,
    next_sentence,
    token_embedding,
)
from cloze.model_store.heads.embedding import pool
from cloze.model_store.layouts import Feeds, Layout
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


def place(lengths: Sequence[int] | np.ndarray) -> Feeds:
    return placement_of(Layout.PACKED, lengths).feeds()


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


@pytest.mark.parametrize("pooling", list(Pooling))
def test_every_pooling_agrees_with_torch(
    pooling: Pooling, bert: Checkpoint, on_cuda: bool, tmp_path: Path
) -> None:
    checkpoint = replace(bert, recipe=replace(bert.recipe, pooling=pooling))
    graph = writer_of(checkpoint, tmp_path).write(Precision.FP16)
    subject = GraphUnderTest(graph, checkpoint, checkpoint.default_heads, 64)
    verify(tmp_path, subject, open_packed(tmp_path / graph.file, on_cuda))


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
@torch.no_grad()
def test_folding_biases_is_exact(
    kind: str, checkpoints: dict[str, Path], on_cuda: bool, tmp_path: Path
) -> None:
    """The same trunk in fp32, where nothing hides behind rounding."""
    model = load_checkpoint(str(checkpoints[kind])).model
    g = GraphBuilder()
    g.output(
        model.encoder.write(PackedTrunk(Fp32(g)))[-1],
        "hidden",
        TensorProto.FLOAT,
        ["T", model.config.hidden_size],
    )
    g.save(tmp_path / "g.onnx", tmp_path / "w.bin")
    lengths = np.array([3, 40, 17], np.int32)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.config.vocab_size, lengths.sum(), dtype=np.int32)
    feeds = {tensors.INPUT_IDS.name: ids} | place(lengths)
    types = rng.integers(0, 2, len(ids), dtype=np.int32)
    if model.config.type_vocab_size:
        feeds[tensors.TOKEN_TYPE_IDS.name] = types
    hidden = open_packed(tmp_path / "g.onnx", on_cuda).run(["hidden"], feeds)[0]
    for begin, end in pairwise(placement_of(Layout.PACKED, lengths).starts):
        one, its_types = (torch.from_numpy(array[begin:end])[None] for array in (ids, types))
        np.testing.assert_allclose(hidden[begin:end], model(one, its_types)[0].numpy(), atol=2e-5)


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


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9))
def test_every_token_has_its_place(lengths: list[int]) -> None:
    placed = place(lengths)
    assert placed[tensors.POSITION_IDS.name].tolist() == [
        i for length in lengths for i in range(length)
    ]
    assert placed[tensors.CU_SEQLENS.name].tolist() == [
        sum(lengths[:i]) for i in range(len(lengths) + 1)
    ]
    cells = placed[tensors.TOKEN_OFFSET.name].ravel().tolist()
    assert cells[: sum(lengths)] == [
        row * max(lengths) + i for row, length in enumerate(lengths) for i in range(length)
    ]
    assert sorted(cells) == list(range(len(lengths) * max(lengths)))
    assert all(array.dtype == np.int32 for array in placed.values())


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    seed=st.integers(0, 99),
    pooling=st.sampled_from(Pooling),
    leaves_out=st.booleans(),
)
def test_what_is_pooled_is_the_sequence(
    lengths: list[int], seed: int, pooling: Pooling, leaves_out: bool
) -> None:
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(sum(lengths), 5)).astype(np.float32)
    chosen = rng.permutation(len(lengths))[: rng.integers(1, len(lengths) + 1)]
    sizes, starts = np.array(lengths, np.int32), placement_of(Layout.PACKED, lengths).starts
    firsts = rng.integers(0, sizes[chosen]).astype(np.int32) if leaves_out else None
    feeds = pool(starts[chosen], sizes[chosen], pooling, firsts)
    rows = hidden[feeds[embedding.POOL_ROWS.name]]
    pooled = (
        rows.max(1)
        if pooling is Pooling.MAX
        else (rows * feeds[embedding.POOL_WEIGHTS.name][:, :, None]).sum(1)
    )
    expected = {
        Pooling.MEAN: lambda part: part.mean(0),
        Pooling.CLS: lambda part: part[0],
        Pooling.MAX: lambda part: part.max(0),
        Pooling.MEAN_SQRT_LENGTH: lambda part: part.sum(0) / len(part) ** 0.5,
        Pooling.LAST: lambda part: part[-1],
    }
    for place, (row, number) in enumerate(zip(pooled, chosen, strict=True)):
        first = 0 if firsts is None else firsts[place]
        part = hidden[starts[number] + first : starts[number + 1]]
        weights = np.arange(1 + first, 1 + sizes[number])
        weighted = np.average(part, 0, weights)
        wanted = weighted if pooling is Pooling.WEIGHTED_MEAN else expected[pooling](part)
        np.testing.assert_allclose(row, wanted, atol=1e-5)


def test_a_wrong_graph_is_not_let_through(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(checkpoints["bert"]))
    graph = writer_of(checkpoint, tmp_path).write(Precision.FP16)
    with torch.no_grad():
        checkpoint.model.encoder.layers[1].attention.value.bias += 0.5  # type: ignore[union-attr, operator]
    with pytest.raises(ExportError, match=r"parity: .* differs from torch"):
        verify(tmp_path, GraphUnderTest(graph, checkpoint, checkpoint.default_heads, 64))


def test_what_fp16_cannot_hold_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(checkpoints["bert"]))
    with torch.no_grad():
        checkpoint.model.encoder.layers[0].up.weight[0, 0] = 1e5  # type: ignore[union-attr, index]
    with pytest.raises(ExportError, match=r"layers\.0\.up.* holds 1e\+05, which fp16 cannot"):
        writer_of(checkpoint, tmp_path).write(Precision.FP16)


def test_heads_without_a_fast_kernel_are_refused(tmp_path: Path) -> None:
    """The graph would run, by kernels that wait for the host in each layer."""
    checkpoint = load_checkpoint(
        str(save_checkpoint(tmp_path / "c", "bert", hidden_size=48, num_attention_heads=4))
    )
    with pytest.raises(
        ExportError,
        match="heads of 12 numbers have no fast attention in fp16, only multiples of 8 up to 256",
    ):
        writer_of(checkpoint, tmp_path).write(Precision.FP16)


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
    assert "packed, fp16" in shown.output


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


def test_all_tasks_are_in_one_packed_batch(bert: Checkpoint, on_cuda: bool, tmp_path: Path) -> None:
    """A batch's answers are those of each sequence alone."""
    graph = writer_of(bert, tmp_path).write(Precision.FP16)
    session = open_packed(tmp_path / graph.file, on_cuda)
    rng = np.random.default_rng(3)
    lengths = np.array([5, 33, 12, 7], np.int32)
    starts = placement_of(Layout.PACKED, lengths).starts
    ids = rng.integers(0, bert.tokenizer.size, starts[-1], dtype=np.int32)

    def run(ids: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
        starts = placement_of(Layout.PACKED, lengths).starts[:-1]
        feeds = {
            tensors.INPUT_IDS.name: ids,
            tensors.TOKEN_TYPE_IDS.name: np.zeros_like(ids),
            masked_lm.MASK_ROWS.name: starts + 1,
            masked_lm.TOP_K.name: np.array([3]),
            masked_lm.TARGET_MASKS.name: np.zeros(0, np.int32),
            masked_lm.TARGET_IDS.name: np.zeros(0, np.int32),
            next_sentence.PAIR_ROWS.name: starts,
            token_embedding.HIDDEN_ROWS.name: starts,
        }
        feeds |= place(lengths) | pool(starts, lengths, bert.recipe.pooling)
        wanted = [
            masked_lm.TOP_LOGITS.name,
            next_sentence.PAIR_LOGITS.name,
            embedding.EMBEDDINGS.name,
        ]
        return dict(zip(wanted, session.run(wanted, feeds), strict=True))

    together = run(ids, lengths)
    for number, (begin, end) in enumerate(pairwise(starts)):
        for name, alone in run(ids[begin:end], lengths[number : number + 1]).items():
            np.testing.assert_allclose(together[name][number], alone[0], rtol=2e-3, atol=2e-3)
