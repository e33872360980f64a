"""The authored graph against transformers, which nobody here wrote: every head, several seeds,
sizes and shapes.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.export.check.verify import GraphUnderTest, verify
from cloze.export.errors import ExportError
from cloze.export.heads import MASKED_LM, NEXT_SENTENCE, SPAN
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.model import GraphWriter
from cloze.export.publish import export
from cloze.model_store import Store, tensors
from cloze.model_store.heads import (
    Head,
    embedding,
    layer_embedding,
    masked_lm,
    next_sentence,
    span,
    sparse_embedding,
    token_embedding,
)
from cloze.service.core import Device
from cloze.service.engine.onnx_engine import OnnxEngine
from cloze.service.errors import StartupError
from tests.support import crafted
from tests.support.tiny import SHAPES, make_model, name_of, save_checkpoint
from tests.support.vocabulary import vocabulary

CASES = [
    pytest.param(kind, seed, sizes, id=f"{name_of(kind, sizes)}-{seed}")
    for kind, shapes in SHAPES.items()
    for sizes in shapes
    for seed in (0, 1)
]


def open_graph(
    checkpoint: Checkpoint, heads: tuple[Head, ...], folder: Path
) -> ort.InferenceSession:
    graph = GraphWriter(checkpoint.model, checkpoint.recipe, heads, folder).write()
    return ort.InferenceSession(folder / graph.file, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(("kind", "seed", "sizes"), CASES)
@torch.no_grad()
def test_every_head_agrees_with_transformers(
    kind: str, seed: int, sizes: dict[str, object], tmp_path: Path
) -> None:
    oracle = make_model(kind, seed, **sizes)
    checkpoint = load_checkpoint(str(save_checkpoint(tmp_path / "checkpoint", kind, seed, **sizes)))
    session = open_graph(checkpoint, checkpoint.heads, tmp_path)
    heads = {head.name for head in checkpoint.heads}
    rng = np.random.default_rng(seed)
    for batch, length in ((1, 3), (3, 17), (2, 160)):
        ids = rng.integers(0, len(vocabulary()), (batch, length)).astype(np.int32)
        types = (np.arange(length) >= length // 2).astype(np.int32)[None].repeat(batch, 0)
        inputs = {"input_ids": torch.from_numpy(ids).long()}
        feeds = {tensors.INPUT_IDS.name: ids}
        if kind.startswith("bert"):
            inputs["token_type_ids"] = torch.from_numpy(types).long()
            feeds[tensors.TOKEN_TYPE_IDS.name] = types
        out = oracle(**inputs, output_hidden_states=True)
        expected = {}
        if MASKED_LM in heads:
            logits = (out.prediction_logits if "prediction_logits" in out else out.logits).flatten(
                0, 1
            )
            rows = rng.choice(batch * length, 3, replace=False).astype(np.int32)
            top = logits[torch.from_numpy(rows).long()].topk(4)
            feeds |= {
                masked_lm.MASK_ROWS.name: rows,
                masked_lm.TOP_K.name: np.array([4]),
                masked_lm.TARGET_MASKS.name: np.array([2, 0], np.int32),
                masked_lm.TARGET_IDS.name: np.array([7, 9], np.int32),
            }
            expected[masked_lm.TOP_LOGITS.name] = top.values
            expected[masked_lm.TOP_IDS.name] = top.indices
            expected[masked_lm.LOGSUMEXP.name] = logits[torch.from_numpy(rows).long()].logsumexp(1)
            expected[masked_lm.TARGET_LOGITS.name] = torch.stack(
                [logits[rows[2], 7], logits[rows[0], 9]]
            )
        if NEXT_SENTENCE in heads:
            feeds[next_sentence.PAIR_ROWS.name] = np.arange(batch, dtype=np.int32) * np.int32(
                length
            )
            expected[next_sentence.PAIR_LOGITS.name] = out.seq_relationship_logits
        if SPAN in heads:
            expected[span.SPAN_LOGITS.name] = torch.stack(
                [out.start_logits, out.end_logits], -1
            ).flatten(0, 1)
        if "sparse_embedding" in heads:
            feeds[sparse_embedding.SPARSE_ROWS.name] = np.arange(
                batch * length, dtype=np.int32
            ).reshape(batch, length)
            feeds[sparse_embedding.SPARSE_TOP_K.name] = np.array([4])
            weights = (
                (out.prediction_logits if "prediction_logits" in out else out.logits)
                .relu()
                .log1p()
                .amax(1)
            )
            expected[sparse_embedding.SPARSE_WEIGHTS.name] = weights.topk(4).values
        feeds[token_embedding.HIDDEN_ROWS.name] = np.arange(batch * length, dtype=np.int32)
        expected[token_embedding.TOKEN_EMBEDDINGS.name] = out.hidden_states[-1].flatten(0, 1)
        by_sequence = np.arange(batch * length, dtype=np.int32).reshape(batch, length)
        weights = rng.normal(size=(batch, len(out.hidden_states))).astype(np.float32)
        feeds[layer_embedding.LAYER_ROWS.name] = by_sequence
        row_weights = np.full((batch, length), 1 / length, np.float32)
        feeds[layer_embedding.LAYER_ROW_WEIGHTS.name] = row_weights
        feeds[layer_embedding.LAYER_WEIGHTS.name] = weights
        states = torch.stack(out.hidden_states, 1) * torch.from_numpy(weights)[..., None, None]
        expected[layer_embedding.LAYER_SUMS.name] = states.sum(1).mean(1)
        expected[layer_embedding.LAYER_MAXIMA.name] = states.sum(1).amax(1)
        feeds[embedding.EMBED_SEQUENCES.name] = np.arange(batch, dtype=np.int32)
        expected[embedding.EMBEDDINGS.name] = out.hidden_states[-1].mean(1)
        for name, actual in zip(expected, session.run(list(expected), feeds), strict=True):
            np.testing.assert_allclose(
                actual, expected[name].numpy(), atol=1e-4, err_msg=f"{name} at {batch} x {length}"
            )


@torch.no_grad()
def test_our_modules_agree_with_transformers_on_padded_batches(tmp_path: Path) -> None:
    for kind in ("bert-plain", "distilbert"):
        oracle = make_model(kind)
        ids = torch.randint(5, len(vocabulary()), (3, 20))
        mask = torch.arange(20) < torch.tensor([[20], [7], [1]])
        expected = oracle(
            input_ids=ids, attention_mask=mask.long(), output_hidden_states=True
        ).hidden_states[-1]
        ours = load_checkpoint(str(save_checkpoint(tmp_path / kind, kind))).model(
            ids, attention_mask=mask
        )
        torch.testing.assert_close(ours[mask], expected[mask], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def bert(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> ort.InferenceSession:
    checkpoint = load_checkpoint(str(checkpoints["bert"]))
    return open_graph(checkpoint, checkpoint.default_heads, tmp_path_factory.mktemp("graph"))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mix_of_heads_gives_each_what_it_gives_alone(
    bert: ort.InferenceSession, data: st.DataObject
) -> None:
    """Rows of one head never depend on what other heads are asked for, zero rows included."""
    batch, length = data.draw(st.integers(1, 4)), data.draw(st.integers(3, 40))
    ids = (
        np.random.default_rng(length)
        .integers(0, len(vocabulary()), (batch, length))
        .astype(np.int32)
    )
    row_sets = st.lists(st.integers(0, batch * length - 1), max_size=5)
    masks, pairs = (
        data.draw(row_sets),
        data.draw(st.lists(st.integers(0, batch - 1), max_size=batch)),
    )
    embeds = data.draw(st.lists(st.integers(0, batch - 1), max_size=batch))

    def run(masks: list[int], pairs: list[int], embeds: list[int]) -> dict[str, np.ndarray]:
        feeds = {
            tensors.INPUT_IDS.name: ids,
            tensors.TOKEN_TYPE_IDS.name: np.zeros_like(ids),
            masked_lm.MASK_ROWS.name: np.array(masks, np.int32),
            masked_lm.TOP_K.name: np.array([3]),
            masked_lm.TARGET_MASKS.name: np.arange(len(masks), dtype=np.int32),
            masked_lm.TARGET_IDS.name: np.full(len(masks), 11, np.int32),
            next_sentence.PAIR_ROWS.name: np.array([pair * length for pair in pairs], np.int32),
            embedding.EMBED_SEQUENCES.name: np.array(embeds, np.int32),
            token_embedding.HIDDEN_ROWS.name: np.array(masks[:1], np.int32),
        }
        return dict(zip([o.name for o in bert.get_outputs()], bert.run(None, feeds), strict=True))

    together = run(masks, pairs, embeds)
    assert together[masked_lm.TOP_LOGITS.name].shape == (len(masks), 3)
    assert (
        together[masked_lm.LOGSUMEXP.name].shape
        == together[masked_lm.TARGET_LOGITS.name].shape
        == (len(masks),)
    )
    assert together[next_sentence.PAIR_LOGITS.name].shape == (len(pairs), 2)
    assert together[embedding.EMBEDDINGS.name].shape == (len(embeds), 64)
    for alone, head in (
        (
            run(masks, [], []),
            (masked_lm.TOP_LOGITS.name, masked_lm.LOGSUMEXP.name, masked_lm.TARGET_LOGITS.name),
        ),
        (run([], pairs, []), (next_sentence.PAIR_LOGITS.name,)),
        (run([], [], embeds), (embedding.EMBEDDINGS.name,)),
    ):
        for name in head:
            np.testing.assert_allclose(together[name], alone[name], atol=1e-5)


def test_fused_operators_are_all_there(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(checkpoints["bert"]))
    operators = (
        GraphWriter(checkpoint.model, checkpoint.recipe, checkpoint.default_heads, tmp_path)
        .write()
        .operators
    )
    layers = checkpoint.model.config.layers
    assert operators["MultiHeadAttention"] == layers
    assert operators["LayerNormalization"] == 2 * layers + 2
    assert operators["BiasGelu"] == layers + 1  # and the masked-language-model head's
    assert "Softmax" not in operators


def test_the_runtime_does_not_fuse_what_is_slower_fused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """See `DenseTrunk` for the times."""
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


def test_the_tied_decoder_is_stored_once(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(checkpoints["bert"]))
    GraphWriter(checkpoint.model, checkpoint.recipe, checkpoint.default_heads, tmp_path).write()
    stored = (tmp_path / "weights.bin").stat().st_size
    assert (
        stored < 4 * checkpoint.model.parameter_count() + 4096 * 100
    )  # alignment; an untied copy would not fit for large V


@pytest.mark.parametrize(
    "damage",
    ["encoder.layers.1.down.weight", "masked_lm.transform.bias", "next_sentence.pooler.weight"],
)
def test_a_graph_that_differs_from_torch_is_not_published(
    checkpoints: dict[str, Path], tmp_path: Path, damage: str
) -> None:
    checkpoint = load_checkpoint(str(checkpoints["bert"]))
    graph = GraphWriter(
        checkpoint.model, checkpoint.recipe, checkpoint.default_heads, tmp_path
    ).write()
    with torch.no_grad():
        checkpoint.model.get_parameter(damage)[0].add_(0.05)
    with pytest.raises(ExportError, match="differs from torch"):
        verify(tmp_path, GraphUnderTest(graph, checkpoint, checkpoint.default_heads, 160))


def test_a_graph_with_wrong_ids_is_not_published(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Right logits under wrong names."""
    checkpoint = load_checkpoint(str(checkpoints["bert"]))
    graph = GraphWriter(
        checkpoint.model, checkpoint.recipe, checkpoint.default_heads, tmp_path
    ).write()
    model = onnx.load(tmp_path / graph.file, load_external_data=False)
    node = next(node for node in model.graph.node if node.output[0] == masked_lm.TOP_IDS.name)
    one = onnx.numpy_helper.from_array(np.array(1), "one")
    model.graph.initializer.append(one)
    node.op_type, node.input[:] = "Add", [node.input[0], "one"]
    onnx.save(model, tmp_path / graph.file)
    with pytest.raises(ExportError, match=r"top_ids at .* differs from torch by inf"):
        verify(tmp_path, GraphUnderTest(graph, checkpoint, checkpoint.default_heads, 160))


def test_a_graph_that_gives_no_number_is_not_published(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(str(checkpoints["bert"]))
    graph = GraphWriter(
        checkpoint.model, checkpoint.recipe, checkpoint.default_heads, tmp_path
    ).write()
    model = onnx.load(tmp_path / graph.file, load_external_data=False)
    spoil(model)
    onnx.save(model, tmp_path / graph.file)
    with pytest.raises(ExportError, match=r"pair_logits at .* differs from torch by inf"):
        verify(tmp_path, GraphUnderTest(graph, checkpoint, checkpoint.default_heads, 160))


def test_a_server_does_not_start_with_a_graph_that_gives_no_number(
    tiny_store: Path, tmp_path: Path
) -> None:
    crafted.craft(tiny_store / "bert/1", tmp_path, crafted.edit_graph(spoil))
    with pytest.raises(StartupError, match=r"golden outputs: pair_logits is off by inf"):
        OnnxEngine(Store(tmp_path).open("bert"), Device.CPU)


def spoil(model: onnx.ModelProto) -> None:
    """Make the logits of pairs of texts NaN."""
    name = "next_sentence.classifier.bias"
    (bias,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full(2, np.nan, np.float32), name))


def test_parity_in_the_manifest_covers_the_grid(tiny_store: Path) -> None:
    parity = Store(tiny_store).manifest("bert").parity
    assert set(parity.max_error) == {
        masked_lm.TOP_LOGITS.name,
        masked_lm.TOP_IDS.name,
        masked_lm.LOGSUMEXP.name,
        masked_lm.TARGET_LOGITS.name,
        next_sentence.PAIR_LOGITS.name,
        embedding.EMBEDDINGS.name,
        token_embedding.TOKEN_EMBEDDINGS.name,
    }
    assert all(0 <= error <= parity.tolerance for error in parity.max_error.values())


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
