"""Exports of GLiNER: the logits of the library, all layouts of folders, and what is refused."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from cloze.export import publish
from cloze.export.check.rounding import input_scales
from cloze.export.errors import ExportError
from cloze.export.graph.linear_ops import InputScale
from cloze.export.graph.session import open_session
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.measure.scorer import GraphScorer
from cloze.export.publish import export
from cloze.model_store import Bundle, Store
from cloze.model_store.batch import Encoding, placement_of
from cloze.model_store.entity_spans import EntityPrompt, split_words
from cloze.model_store.heads.embedding import EmbeddingRequest
from cloze.model_store.heads.entities import (
    ENTITY_LABEL_VECTORS,
    HEAD,
    EntityOptions,
    EntityRequest,
)
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import BundleSpec, Manifest, Parity, Precision
from cloze.service.text.tokenizer import Tokenizer
from tests.support import gliner
from tests.support.command import call

NAME = HEAD.name


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


def graph_of(bundle: Bundle) -> GraphScorer:
    graph = bundle.manifest.graph
    session = open_session(bundle.file(graph.file), graph.layout)
    return GraphScorer(session, bundle.manifest.graph_spec(Layout.DENSE))


def encode(bundle: Bundle, text: str, labels: list[str]) -> Encoding:
    tokenizer, options = Tokenizer(bundle), bundle.manifest.heads[NAME]
    assert isinstance(options, EntityOptions)
    unique = list(dict.fromkeys(labels))
    if (encoder := bundle.label_encoder) is not None:
        prompt = EntityPrompt(vectors=vectors_of(encoder, unique))
    else:
        prompt = EntityPrompt.of(tokenizer.word_ids(unique), options)
    words = [text[slice(*place)] for place in split_words(text)]
    ids, request = prompt.sequence([ids for ids in tokenizer.word_ids(words) if ids])
    return tokenizer.encode(ids, {NAME: request})


def vectors_of(encoder: Bundle, labels: list[str]) -> NDArray[np.float32]:
    """Return what the encoder of labels computes of each label alone."""
    scorer, tokenizer = graph_of(encoder), Tokenizer(encoder)
    asked = {"embedding": EmbeddingRequest()}
    encodings = [tokenizer.encode(ids, asked) for ids in tokenizer.word_ids(labels)]
    return np.stack([scorer.run([one])[0]["embedding"].array for one in encodings])


def inside(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return those of the spans that do not end behind the last word: the others are undefined."""
    inside: NDArray[np.float32] = values[
        np.add.outer(*map(np.arange, values.shape[:2])) < len(values)
    ]
    return inside


@pytest.mark.parametrize("kind", gliner.KINDS)
def test_ids_and_logits_are_those_of_the_library(store: Store, kind: str) -> None:
    bundle = gliner.export_kind(kind, store)
    scorer, worst = graph_of(bundle), 0.0
    for case in gliner.cases(kind):
        encoding = encode(bundle, case.text, case.labels)
        assert encoding.input_ids.tolist() == case.ids, case.text
        [output] = scorer.run([encoding])
        logits, expected = output[NAME].array, case.logits
        assert logits.shape == expected.shape
        compared = np.abs(logits - expected)
        worst = max(worst, float((compared if kind == "token" else inside(compared)).max()))
    assert worst < 1e-4


@pytest.mark.parametrize("kind", ["projected", "bi"])
def test_a_batch_of_other_words_and_labels_changes_nothing(store: Store, kind: str) -> None:
    """The rows of a batch have their own numbers of words and of labels, or ask other heads."""
    bundle = gliner.export_kind(kind, store)
    scorer = graph_of(bundle)
    rng, batch = np.random.default_rng(1), []
    ids = rng.integers(5, 200, (4, 24), np.int32)
    asked = [((5, 6, 9, 20), (1, 3)), ((7,), (1, 2, 4, 5)), None, (tuple(range(4, 22)), (1,))]
    for row, one in zip(ids, asked, strict=True):
        requests = {} if one is None else {NAME: EntityRequest(*one)}
        if kind == "bi" and one is not None:
            vectors = rng.standard_normal((len(one[1]), 6), np.float32)
            requests = {NAME: EntityRequest(one[0], vectors=vectors)}
        batch.append(Encoding(row, np.zeros_like(row), requests))
    outputs = scorer.run(batch)
    assert outputs[2] == {}
    for encoding, output in zip(batch, outputs, strict=True):
        if encoding.requests:
            [alone] = scorer.run([encoding])
            both = [inside(one[NAME].array) for one in (output, alone)]
            np.testing.assert_allclose(*both, atol=1e-5)


def test_texts_share_the_vectors_of_labels(store: Store) -> None:
    """As those of a request do: the graph then gets the vectors once."""
    bundle = gliner.export_kind("bi", store)
    scorer = graph_of(bundle)
    rng = np.random.default_rng(2)
    vectors = rng.standard_normal((5, 6), np.float32)
    ids = rng.integers(5, 200, (3, 24), np.int32)
    asked = [EntityRequest(words, vectors=vectors) for words in ((5, 6, 9), (7,), (1, 2, 3, 4, 5))]
    batch = [
        Encoding(row, np.zeros_like(row), {NAME: one}) for row, one in zip(ids, asked, strict=True)
    ]
    spec = bundle.manifest.graph_spec(Layout.DENSE)
    feeds = HEAD.pack(asked, placement_of(Layout.DENSE, [24] * 3), spec)
    assert feeds[ENTITY_LABEL_VECTORS.name].shape == (1, 5, 6)
    for encoding, output in zip(batch, scorer.run(batch), strict=True):
        [alone] = scorer.run([encoding])
        both = [inside(one[NAME].array) for one in (output, alone)]
        assert both[0].shape[-1] == 5
        np.testing.assert_allclose(*both, atol=1e-5)


def test_a_batch_without_requests_does_not_abort_the_process(store: Store) -> None:
    """onnxruntime's LSTM aborts without a row; another process would notice."""
    bundle = gliner.export_kind("span", store)
    nothing = placement_of(Layout.DENSE, [])
    feeds = HEAD.pack([], nothing, bundle.manifest.graph_spec(Layout.DENSE))
    assert [feed.shape for feed in feeds.values()] == [(1, 0), (1,), (1, 0)]
    program = f"""
import numpy as np, onnxruntime as ort
session = ort.InferenceSession({str(bundle.file(bundle.manifest.graph.file))!r})
feeds = dict(input_ids=np.ones((2, 5), np.int32), entity_words=np.zeros((1, 0), np.int32),
             entity_word_counts=np.zeros(1, np.int32), entity_labels=np.zeros((1, 0), np.int32))
print(session.run(None, feeds)[0].shape)
"""
    done = call(sys.executable, "-c", program, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "(1, 0, 4, 0)"), done.stderr


@pytest.mark.parametrize(("kind", "tokens"), [("span", 1024), ("bi", 256)])
def test_int8_passes_its_gate_of_entities(store: Store, kind: str, tokens: int) -> None:
    bundle = gliner.export_kind(kind, store, precisions=(Precision.INT8,))
    assert bundle.manifest.int8 is not None
    assert bundle.manifest.int8.gate.measured["entity_f1"] >= 0.95
    assert bundle.manifest.limits.max_tokens == tokens  # span: beyond the 16 of its config.json
    if (encoder := bundle.label_encoder) is not None:
        assert encoder.manifest.int8 is not None
        assert encoder.manifest.int8.gate.measured["embedding_cosine_mean"] >= 0.995
    assert store.open(bundle.manifest.reference) == bundle
    again = gliner.export_kind(kind, store, precisions=(Precision.INT8,), reuse=True)
    assert again.manifest.reference == bundle.manifest.reference


@pytest.mark.parametrize("kind", ["marker", "token", "projected", "layout-a"])
def test_int8_of_the_other_kinds_passes(store: Store, kind: str) -> None:
    bundle = gliner.export_kind(kind, store, precisions=(Precision.INT8,))
    assert bundle.manifest.int8 is not None
    assert 0.95 <= bundle.manifest.int8.gate.measured["entity_f1"] < 1


@pytest.mark.parametrize("factor", [16, 0.25])
def test_int8_with_wrong_scales_fails_its_gate(
    store: Store, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Integers are too coarse, or large inputs are clipped."""

    def wrong(*arguments: Any) -> dict[str, InputScale]:
        scales = input_scales(*arguments).items()
        return {name: replace(one, step=factor * one.step) for name, one in scales}

    monkeypatch.setattr(publish, "input_scales", wrong)
    # The comparison with torch, which comes first, would fail too.
    parity = Parity(tolerance=0.25, max_error={}, golden_file="golden.json")
    monkeypatch.setattr(publish, "verify", lambda *_: parity)
    with pytest.raises(ExportError, match=r"entity_f1 is 0\.\d+ and must be at least 0\.95"):
        gliner.export_kind("span", store, precisions=(Precision.INT8,))


def test_a_bi_encoder_never_reads_its_lstm(store: Store, tmp_path: Path) -> None:
    """The library saves one, and does not call it: NaN changes nothing."""
    file = gliner.copy_of("bi", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    lstm = [name for name in tensors if name.startswith("rnn.")]
    save_file(tensors | {name: torch.full_like(tensors[name], torch.nan) for name in lstm}, file)
    assert lstm
    original, changed = gliner.export_kind("bi", store), export(str(file.parent), "nan", store)
    for bundle in (original, changed):
        for case in itertools.islice(gliner.cases("bi"), 3):
            [output] = graph_of(bundle).run([encode(bundle, case.text, case.labels)])
            assert np.abs(inside(output[NAME].array - case.logits)).max() < 1e-4


def test_labels_may_have_the_tokenizer_of_their_backbone(store: Store, tmp_path: Path) -> None:
    """Older folders have only the name of the encoder of labels."""
    folder = gliner.copy_of("bi", tmp_path, labels_encoder_config=None)
    backbone = tmp_path / "labels"
    (folder / "labels_tokenizer").rename(backbone)
    with pytest.raises(ExportError, match="name a directory with both as labels_encoder"):
        load_checkpoint(str(folder))
    settings = json.loads((gliner.FOLDER / "bi-0/gliner_config.json").read_text())
    (backbone / "config.json").write_text(json.dumps(settings["labels_encoder_config"]))
    file = folder / "gliner_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "labels_encoder": str(backbone)}))
    one, other = gliner.export_kind("bi", store), export(str(folder), "older", store)
    assert [f.sha256 for name, f in sorted(one.manifest.files.items()) if "golden" not in name] == [
        f.sha256 for name, f in sorted(other.manifest.files.items()) if "golden" not in name
    ]


def test_a_bundle_has_an_encoder_of_labels_of_its_width(store: Store) -> None:
    manifest = gliner.export_kind("bi", store).manifest
    fields = json.loads(manifest.to_bytes()) | {"label_encoder": None}
    with pytest.raises(ValueError, match=r"label_size is 6, but the vectors .* no numbers"):
        Manifest.model_validate({n: value for n, value in fields.items() if n != "digest"})
    outer = {n: value for n, value in dict(manifest).items() if n in BundleSpec.model_fields}
    with pytest.raises(ValueError, match="has an encoder of labels"):
        Manifest.model_validate({**dict(manifest), "label_encoder": outer})
    with pytest.raises(ExportError, match="takes no adapters"):
        gliner.export_kind("bi", store, adapters=("all-linear",))


@pytest.mark.parametrize(
    ("kind", "config", "named"),
    [
        ("span", {"labels_decoder": "gpt2"}, "a decoder that writes labels"),
        ("span", {"relations_layer": "dot"}, "relations between entities"),
        ("span", {"model_type": "gliner_streaming_span"}, "for streams"),
        ("span", {"span_mode": "conv_max"}, "span_mode 'conv_max'"),
        ("span", {"represent_spans": True}, "represent_spans"),
        ("span", {"fuse_layers": True}, "fuse_layers"),
        ("span", {"span_encoder_config": {"model_type": "rnn"}}, "span_encoder_config"),
        ("span", {"precomputed_prompts_mode": True}, "precomputed_prompts_mode"),
        ("span", {"subtoken_pooling": "mean"}, "subtoken_pooling 'mean'"),
        ("span", {"words_splitter_type": "spacy"}, "words_splitter_type 'spacy'"),
        ("span", {"encoder_config": {"model_type": "t5"}}, "'t5'"),
        ("span", {"class_token_index": 5}, "class_token_index is 5"),
        ("span", {"hidden_size": 6}, "token_rep_layer.projection.weight"),
        ("span", {"max_width": 400}, "max_width"),
        ("span", {"num_rnn_layers": 2}, "rnn.lstm.weight_ih_l1"),
        ("span", {"ent_token": "<<NO>>"}, "lacks the marker <<NO>>"),
        ("bi", {"span_mode": "token_level"}, "span_mode token_level"),
        ("bi", {"post_fusion_schema": "l2l-l2t"}, "post_fusion_schema"),
        ("bi", {"labels_encoder_config": {"model_type": "t5"}}, "'t5'"),
        ("bi", {"fuse_layers": True}, "fuse_layers"),
    ],
)
def test_variants_are_refused_by_name(
    tmp_path: Path, kind: str, config: dict[str, object], named: str
) -> None:
    with pytest.raises(ExportError, match=named.replace("(", r"\(")):
        load_checkpoint(str(gliner.copy_of(kind, tmp_path, **config)))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("span", "rnn.lstm.bias_hh_l0"),
        ("span", "prompt_rep_layer.3.weight"),
        ("bi", "prompt_rep_layer.3.weight"),
        ("bi", "token_rep_layer.labels_projection.bias"),
    ],
)
def test_a_missing_tensor_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    file = gliner.copy_of(kind, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ExportError, match=f"lacks {name}"):
        load_checkpoint(str(file.parent))
    tensors[name] = torch.full((1,), 1.0)
    save_file(tensors, file)
    with pytest.raises(ExportError, match=f"{name} has shape"):
        load_checkpoint(str(file.parent))


def test_the_lstm_may_be_missing_if_an_older_config_says_so(tmp_path: Path) -> None:
    file = gliner.copy_of("span", tmp_path, has_rnn=False) / "model.safetensors"
    assert load_checkpoint(str(file.parent)).model.entities.lstm is not None  # its tensors count
    save_file({n: t for n, t in load_file(file).items() if not n.startswith("rnn.")}, file)
    assert load_checkpoint(str(file.parent)).model.entities.lstm is None


def test_a_backbone_that_is_missing_is_asked_for(tmp_path: Path) -> None:
    folder = gliner.copy_of("layout-a", tmp_path, model_name=str(tmp_path / "none"))
    with pytest.raises(ExportError, match="by --backbone"):
        load_checkpoint(str(folder))
    (tmp_path / "plain").mkdir()
    with pytest.raises(ExportError, match="--backbone is for a checkpoint of GLiNER"):
        load_checkpoint(str(tmp_path / "plain"), backbone=str(tmp_path))
