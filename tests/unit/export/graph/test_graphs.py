"""Whole graphs of tiny models against torch: layouts, precisions, stored weights and poolings."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from cloze.export.blocks.config import Convolution, RelativePositions
from cloze.export.blocks.window import _write_raised
from cloze.export.check.rounding import input_scales, round_weights
from cloze.export.check.verify import GraphUnderTest, verify
from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.graph.builder import GraphBuilder
from cloze.export.graph.session import open_session
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.model import LAYOUTS, GraphWriter, Model
from cloze.model_store.batch import BatchCodec, Encoding
from cloze.model_store.heads import (
    HEADS,
    Head,
    Pooling,
    embedding,
    entities,
    masked_lm,
    multi_vector,
)
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Graph, Parity, Precision, Weights
from tests.support.tiny_models import TOKENIZER, checkpoint, model, projected

ALL = tuple(HEADS.values())
MOST = {Precision.FP32: 2e-6, Precision.FP16: 0.006, Precision.INT8: 0.12}
"""The largest errors of these models, far below the tolerances of large ones."""


def written(
    folder: Path,
    made: Model,
    recipe: EmbeddingRecipe,
    precisions: Sequence[Precision],
    weights: Weights = Weights.FP32,
    heads: tuple[Head, ...] = ALL,
) -> dict[Precision, Graph]:
    scales = {}
    if weights is Weights.INT8 or Precision.INT8 in precisions:
        scales = input_scales(made, TOKENIZER)
    round_weights(made, recipe, weights, scales)
    writer = GraphWriter(made, recipe, heads, folder, weights, scales)
    return {precision: writer.write(precision) for precision in precisions}


def verified(
    folder: Path, graph: Graph, made: Model, recipe: EmbeddingRecipe, heads: tuple[Head, ...] = ALL
) -> Parity:
    subject = GraphUnderTest(graph, checkpoint(made, recipe), heads, 20)
    parity = verify(folder, subject)
    assert max(parity.max_error.values()) < MOST[graph.precision]
    assert set(parity.max_error) == {tensor.name for head in heads for tensor in head.outputs}
    one = Encoding(np.array([2, 5, 3], np.int32), np.zeros(3, np.int32))
    declared = onnx.load(folder / graph.file, load_external_data=False).graph.input
    assert {value.name for value in declared} == set(BatchCodec(subject.spec).pack([one]).feeds)
    return parity


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("precision", list(Precision))
def test_every_head_agrees_with_torch(family: str, precision: Precision, tmp_path: Path) -> None:
    made, recipe = model(family), projected()
    if LAYOUTS[precision] not in FAMILIES[family].layouts:
        with pytest.raises(
            ExportError, match=f"a {family} has no fp16 graph: (its .*attention|with)"
        ):
            written(tmp_path, made, recipe, [precision])
        return
    graphs = written(tmp_path, made, recipe, [precision])
    verified(tmp_path, graphs[precision], made, recipe)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_filling_to_which_no_token_attends(family: str, tmp_path: Path) -> None:
    made, recipe, heads = model(family), EmbeddingRecipe(), (multi_vector.HEAD, embedding.HEAD)
    filled = made.options["multi_vector"].model_copy(update={"filling": 4})
    made.multi_vector.options = made.options["multi_vector"] = filled
    graphs = written(tmp_path, made, recipe, [Precision.FP32], heads=heads)
    verified(tmp_path, graphs[Precision.FP32], made, recipe, heads)
    with pytest.raises(ExportError, match="no fp16 graph"):
        written(tmp_path, made, recipe, [Precision.FP16], heads=heads)


def test_keys_outside_a_window_have_weights_that_are_tiny_but_normal_numbers(
    tmp_path: Path,
) -> None:
    g, none = GraphBuilder(), -np.inf
    scores = g.input("scores", TensorProto.FLOAT, ["R", 3])
    weights = g.op("Softmax", [_write_raised(g, scores)], axis=-1)
    g.output(weights, "weights", TensorProto.FLOAT, ["R", 3])
    g.save(tmp_path / "g.onnx", tmp_path / "weights.bin")
    rows = [[0, -3, none], [400, 399, none], [none, -900, -100], [none, none, none]]
    given = np.array(rows, np.float32)
    (found,) = open_session(tmp_path / "g.onnx", Layout.DENSE).run(["weights"], {"scores": given})
    expected = torch.from_numpy(given).softmax(-1).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-7)
    assert found[:3].min() > np.finfo(np.float32).tiny
    assert np.isnan(found[3]).all()


@pytest.mark.parametrize("family", ["mpnet", "deberta-v2"])
def test_distances_reach_to_both_ends_of_the_longest_sequence(family: str, tmp_path: Path) -> None:
    longest, heads = 130, (embedding.HEAD,)  # three blocks or nine runs, the last of two tokens
    made = model(family, max_positions=longest)
    graphs = written(tmp_path, made, EmbeddingRecipe(), [Precision.FP32], heads=heads)
    subject = GraphUnderTest(
        graphs[Precision.FP32], checkpoint(made, EmbeddingRecipe()), heads, longest
    )
    assert max(verify(tmp_path, subject).max_error.values()) < MOST[Precision.FP32]


@pytest.mark.parametrize("terms", [("c2p",), ("p2c",), ("c2p", "p2c")])
@pytest.mark.parametrize("share", [False, True])
def test_each_way_to_see_positions_agrees_with_torch(
    terms: tuple[str, ...], share: bool, tmp_path: Path
) -> None:
    sizes = {"distances": 24, "buckets": 0, "terms": terms, "share_projections": share}
    more = {"type_vocab_size": 2, "position_embeddings": True, "embedding_size": 12}
    convolution = Convolution(kernel=3, groups=2, activation="gelu")
    made = model(
        "deberta-v2", relative_positions=RelativePositions(**sizes), convolution=convolution, **more
    )
    graphs = written(tmp_path, made, projected(), [Precision.FP32])
    verified(tmp_path, graphs[Precision.FP32], made, projected())


def test_a_layer_that_is_passed_often_is_stored_once(tmp_path: Path) -> None:
    sizes = {"layer_groups": 1, "hidden_size": 32, "intermediate_size": 64}
    for layers in (1, 6):
        folder = tmp_path / str(layers)
        folder.mkdir()
        made = model("albert", layers=layers, **sizes)
        both = [Precision.FP32, Precision.INT8]
        written(folder, made, EmbeddingRecipe(), both, heads=(embedding.HEAD,))
    for file in ("weights.bin", "weights-int8.bin"):
        one, six = ((tmp_path / layers / file).stat().st_size for layers in ("1", "6"))
        assert one == six


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("weights", [Weights.FP32, Weights.INT8])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_no_two_products_of_int8_read_a_weight_of_one_name(
    family: str, weights: Weights, is_adapted: bool, tmp_path: Path
) -> None:
    """onnxruntime's rewrite of signed weights, which AVX2 needs, fails for such a weight."""
    made = model(family)
    scales = input_scales(made, TOKENIZER)
    recipe, groups = EmbeddingRecipe(), made.encoder.products().values()
    adapted = [one for group in groups for one in group.linears] if is_adapted else None
    round_weights(made, recipe, weights, scales)
    writer = GraphWriter(made, recipe, ALL, tmp_path, weights, scales)
    file = tmp_path / writer.write(Precision.INT8, adapted).file
    graph = onnx.load(file, load_external_data=False).graph
    moved = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Transpose"}
    stored = {weight.name for weight in graph.initializer}
    read = [
        moved.get(node.input[1], node.input[1])
        for node in graph.node
        if node.op_type == "MatMulIntegerToFloat"
    ]
    assert stored.issuperset(read)
    assert len(read) == len(set(read)) > 2 + made.config.layers


@pytest.mark.parametrize("head", list(HEADS))
def test_each_head_is_complete_without_the_others(head: str, tmp_path: Path) -> None:
    """Heads share constants, so a head alone has its own."""
    made, recipe, heads = model(), projected(), (HEADS[head],)
    graphs = written(tmp_path, made, recipe, [Precision.FP32, Precision.INT8], heads=heads)
    for precision in graphs:
        verified(tmp_path, graphs[precision], made, recipe, heads)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_last_layer_computes_only_rows_that_heads_read(family: str, tmp_path: Path) -> None:
    made, recipe, heads = model(family), projected(), (entities.HEAD,)
    graphs = written(tmp_path, made, recipe, [Precision.FP32, Precision.INT8], heads=heads)
    for graph in graphs.values():
        verified(tmp_path, graph, made, recipe, heads)
        assert graph.operators["Flatten"] >= 2  # before rows are gathered


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "nomic_bert"])
@pytest.mark.parametrize("weights", [Weights.FP16, Weights.INT8])
def test_rounded_weights_are_those_of_torch(family: str, weights: Weights, tmp_path: Path) -> None:
    made, recipe = model(family), projected()
    served = [p for p in Precision if LAYOUTS[p] in FAMILIES[family].layouts]
    for precision, graph in written(tmp_path, made, recipe, served, weights).items():
        verified(tmp_path, graph, made, recipe)
        assert (graph.precision, graph.weights) == (precision, weights)


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_every_pooling_agrees_with_torch(
    pooling: Pooling, precision: Precision, tmp_path: Path
) -> None:
    made, recipe, heads = model(), EmbeddingRecipe(pooling), (embedding.HEAD,)
    graphs = written(tmp_path, made, recipe, [precision], heads=heads)
    verified(tmp_path, graphs[precision], made, recipe, heads)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("precision", list(Precision))
def test_every_activation_agrees_with_torch(
    activation: str, precision: Precision, tmp_path: Path
) -> None:
    made, recipe, heads = model(activation=activation), EmbeddingRecipe(), (masked_lm.HEAD,)
    graphs = written(tmp_path, made, recipe, [precision], heads=heads)
    verified(tmp_path, graphs[precision], made, recipe, heads)


def test_weights_of_several_graphs_are_stored_once(tmp_path: Path) -> None:
    made, recipe = model(hidden_size=32, intermediate_size=64), EmbeddingRecipe()
    written(tmp_path, made, recipe, [Precision.FP32, Precision.INT8], Weights.INT8)
    size = (tmp_path / "weights.bin").stat().st_size
    assert not (tmp_path / "weights-int8.bin").exists()
    alone = tmp_path / "alone"
    alone.mkdir()
    GraphWriter(made, recipe, ALL, alone, Weights.INT8, input_scales(made, TOKENIZER)).write()
    assert (alone / "weights.bin").stat().st_size == size


@pytest.mark.parametrize(
    ("hidden", "heads", "fits"),
    [(16, 2, True), (12, 1, False), (256, 1, True), (264, 1, False), (24, 2, False)],
)
def test_heads_without_a_fast_kernel_are_refused(
    hidden: int, heads: int, fits: bool, tmp_path: Path
) -> None:
    made = model(hidden_size=hidden, heads=heads, layers=1)
    writer = GraphWriter(made, EmbeddingRecipe(), (embedding.HEAD,), tmp_path)
    if fits:
        writer.write(Precision.FP16)
    else:
        with pytest.raises(ExportError, match=f"heads of {hidden // heads} numbers have no fast"):
            writer.write(Precision.FP16)
        writer.write(Precision.FP32)
