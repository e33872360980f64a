"""sentence-transformers directories, as several of its versions write them, against sentence-
transformers itself.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling
from tokenizers import Tokenizer as Backend

from cloze.export.errors import ExportError
from cloze.export.graph.builder import GraphBuilder
from cloze.export.heads.embedding import DENSE_ACTIVATIONS, Projection
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.load.sentence_transformers import SentenceTransformersFolder
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.manifest import Precision
from tests.support.sentence_folders import TEXTS, edit, ours, saved

read = SentenceTransformersFolder.read


def assert_same(folder: Path, store: Path) -> None:
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=1)
    np.testing.assert_allclose(ours(folder, store), theirs, atol=1e-4)


@pytest.mark.parametrize(
    "mode",
    ["mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", ("lasttoken", "mean")],
    ids=str,
)
def test_each_pooling(tmp_path: Path, mode: Any) -> None:
    """Several are joined in the order of the list."""
    assert_same(saved(tmp_path, "bert-plain", Pooling(64, pooling_mode=mode)), tmp_path / "store")


@pytest.mark.parametrize("family", ["distilbert", "modernbert"])
def test_other_families(family: str, tmp_path: Path) -> None:
    after = [Pooling(64, pooling_mode="cls"), Normalize()]
    assert_same(saved(tmp_path, family, *after), tmp_path / "store")


@pytest.mark.parametrize(
    "after",
    [
        lambda: [Pooling(64, pooling_mode="cls"), Dense(64, 24), Normalize()],
        lambda: [
            Pooling(64, pooling_mode="mean"),
            Dense(64, 32, bias=False, activation_function=torch.nn.Identity()),
            Dense(32, 8),
        ],
        lambda: [
            Pooling(64, pooling_mode=("cls", "mean")),
            Normalize(),
            Dense(128, 24, activation_function=torch.nn.GELU(), use_residual=True),
            LayerNorm(24),
        ],
        lambda: [
            Pooling(64, pooling_mode="mean"),
            Dense(64, 64, activation_function=torch.nn.SiLU(), use_residual=True),
            Normalize(),
        ],
    ],
    ids=["projected", "projected-twice", "joined", "residual"],
)
def test_what_follows_pooling(tmp_path: Path, after: Callable[[], list[Any]]) -> None:
    torch.manual_seed(0)
    assert_same(saved(tmp_path, "bert-plain", *after()), tmp_path / "store")


@pytest.mark.parametrize("mode", ["cls_token", "mean_sqrt_len_tokens"])
def test_directories_of_older_versions(tmp_path: Path, mode: str) -> None:
    """Old class paths, one boolean a pooling mode, the encoder in a folder of its own, its limit in
    an odd file.
    """
    new, old = saved(tmp_path, "bert-plain", Pooling(64, pooling_mode="mean")), tmp_path / "old"
    ignored = shutil.ignore_patterns("1_Pooling", "modules.json", "*sentence*")
    shutil.copytree(new, old / "0_Transformer", ignore=ignored)
    (old / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    modules = [("0_Transformer", "Transformer"), ("1_Pooling", "Pooling")]
    files = {
        "0_Transformer/sentence_distilbert_config.json": {
            "max_seq_length": 24, "do_lower_case": False,
        },
        "1_Pooling/config.json": {"word_embedding_dimension": 64}
        | {f"pooling_mode_{name}": name == mode for name in modes},
        "modules.json": [
            {"idx": n, "name": str(n), "path": p, "type": f"sentence_transformers.models.{t}"}
            for n, (p, t) in enumerate(modules)
        ],
    }  # fmt: skip
    for name, content in files.items():
        (old / name).write_text(json.dumps(content))
    recipe = read(old).recipe
    assert recipe.max_tokens == 24
    assert_same(old, tmp_path / "store")


def test_a_limit_above_the_tokenizers_wins(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert-plain", Pooling(64, pooling_mode="mean"))
    edit(folder, "tokenizer_config.json", model_max_length=8)
    edit(folder, "sentence_bert_config.json", max_seq_length=30)
    assert_same(folder, tmp_path / "store")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
def test_the_start_of_long_texts_is_cut_if_the_tokenizer_says_so(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert-plain", Pooling(64, pooling_mode="mean"), max_tokens=12)
    text = "the king walked to the old house of the river and the moon was red"
    if name == "tokenizer.json":
        backend = Backend.from_file(str(folder / name))
        backend.enable_truncation(12, direction="left")
        backend.save(str(folder / name))
        edit(folder, "tokenizer_config.json", truncation_side="")
    else:
        edit(folder, name, truncation_side="left")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings = {key: value for key, value in settings.items() if value != ""}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    [theirs] = SentenceTransformer(str(folder), device="cpu").encode([text])
    [mine] = ours(folder, tmp_path / "store", texts=[text])
    np.testing.assert_allclose(mine, theirs, atol=1e-4)
    [right] = ours(folder, tmp_path / "store", texts=[text], truncation_direction="right")
    assert np.abs(mine - right).max() > 1e-2, "a request may still ask for the other end"
    manifest = Store(tmp_path / "store").manifest("st")
    assert manifest.tokenizer.truncation_side == "left"


@pytest.mark.parametrize("name", ["processor_kwargs", "tokenizer_args"])
def test_arguments_of_the_tokenizer_are_applied(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert-plain", Pooling(64, pooling_mode="mean"), max_tokens=40)
    given = {"truncation_side": "left", "model_max_length": 12, "use_fast": True}
    edit(folder, "sentence_bert_config.json", **{name: given}, max_seq_length=20)
    text = "the king walked to the old house of the river and the moon was red"
    [theirs] = SentenceTransformer(str(folder), device="cpu").encode([text])
    [mine] = ours(folder, tmp_path / "store", texts=[text])
    np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_other_arguments_are_applied_or_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert-plain", Pooling(64, pooling_mode="mean"))
    arguments = {
        "config_args": {"hidden_act": "relu"},
        "model_args": {"attn_implementation": "eager"},
        "processor_kwargs": {"dropout": 0.1},
        "query_length": 9,
    }
    edit(folder, "sentence_bert_config.json", **arguments)
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.model.config.activation == "relu"
    unread = "model_kwargs attn_implementation, processor_kwargs dropout, query_length"
    assert f"sentence_bert_config.json: not applied: {unread}" in checkpoint.notes
    (folder / "modules.json").unlink()
    assert load_checkpoint(str(folder)).model.config.activation == "gelu", "no one reads the file"


def test_prompts_are_kept_and_used(tmp_path: Path) -> None:
    given = {"prompts": {"query": "who: ", "document": ""}, "default_prompt_name": "query"}
    folder = saved(tmp_path, "bert-plain", Pooling(64, pooling_mode="mean"), **given)
    theirs = SentenceTransformer(str(folder), device="cpu")
    for name in (None, "document"):
        expected = theirs.encode(TEXTS, batch_size=1, prompt_name=name)
        mine = ours(folder, tmp_path / str(name), prompt_name=name)
        np.testing.assert_allclose(mine, expected, atol=1e-4)


@pytest.mark.parametrize("name", list(DENSE_ACTIVATIONS))
def test_every_activation_of_a_dense_layer_has_its_operator(name: str, tmp_path: Path) -> None:
    x = torch.linspace(-8, 8, 24).view(2, 12)
    step = Projection(torch.eye(12), torch.full((12,), 0.1), name)
    g = GraphBuilder()
    g.input("x", TensorProto.FLOAT, ["E", 12])
    g.output(step.write(g, "x", "dense"), "y", TensorProto.FLOAT, ["E", 12])
    g.save(tmp_path / "graph.onnx", tmp_path / "weights.bin")
    session = onnxruntime.InferenceSession(str(tmp_path / "graph.onnx"))
    [found] = session.run(None, {"x": x.numpy()})
    expected = step.function(x + 0.1)
    assert type(step.function) is getattr(torch.nn, name)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(step(x).detach(), expected, atol=1e-6)


def test_defaults_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert-plain", Pooling(64, pooling_mode="cls"), Dense(64, 8))
    (folder / "1_Pooling/config.json").write_text('{"word_embedding_dimension": 64}')
    edit(folder, "2_Dense/config.json", activation_function="my_package.Special")
    edit(folder, "sentence_bert_config.json", do_lower_case=True)
    edit(folder, "1_Pooling/config.json", include_prompt=False)
    edit(folder, "config_sentence_transformers.json", prompts={"query": "", "document": ""})
    recipe = read(folder).recipe
    [step] = recipe.steps
    assert (recipe.poolings, step.activation) == (("mean",), "Tanh"), "a class outside of torch"
    assert recipe.include_prompt, "there is none to leave out"
    assert read(folder).of_encoder.lowercase
    edit(folder, "sentence_bert_config.json", tokenizer_name_or_path="x/y")
    with pytest.raises(ExportError, match="tokenizer_name_or_path 'x/y' is not supported"):
        read(folder)


def test_a_packed_graph_of_joined_poolings_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert-plain", Pooling(64, pooling_mode=("cls", "mean")))
    options = ExportOptions(precisions=(Precision.FP16,))
    with pytest.raises(ExportError, match=r"one pooling, not cls \+ mean"):
        export(str(folder), "st", Store(tmp_path / "store"), options)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "prompts by word": (lambda f: edit(f, "1_Pooling/config.json", include_prompt="no"), "include_prompt 'no'; it must be true or false"),
    "residual": (lambda f: edit(f, "2_Dense/config.json", use_residual=True), "lacks residual.weight"),
    "tokens": (lambda f: edit(f, "2_Dense/config.json", module_input_name="token_embeddings"), "module_input_name 'token_embeddings'"),
    "unknown module": (lambda f: (f / "modules.json").write_text((f / "modules.json").read_text().replace("Dense", "LSTM", 1)), "LSTM|no weights"),
    "climbs out": (lambda f: (f / "modules.json").write_text((f / "modules.json").read_text().replace("1_Pooling", "../x")), "outside the checkpoint's folder"),
    "not a list": (lambda f: (f / "modules.json").write_text("5"), "modules.json cannot be read"),
    "number for a prompt": (lambda f: edit(f, "config_sentence_transformers.json", prompts={"query": 5}), "prompts must be texts by name, got {'query': 5}"),
    "mask of tokens": (lambda f: (f / "modules.json").write_text((f / "modules.json").read_text().replace("pooling.Pooling", "x.MultiVectorMask")), "names Transformer, MultiVectorMask, Dense, which is not supported"),
    "short limit": (lambda f: edit(f, "sentence_bert_config.json", max_seq_length=2), "max_seq_length must be a number of at least 3, got 2"),
    "other calls": (lambda f: edit(f, "sentence_bert_config.json", processing_kwargs={"text": {"padding": True, "max_length": 9}}), "processing_kwargs text.max_length is not supported"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_reproduced_is_refused(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    folder = saved(tmp_path, "bert-plain", Pooling(64, pooling_mode="mean"), Dense(64, 8))
    assert read(folder).recipe is not None
    change(folder)
    with pytest.raises(ExportError, match=message):
        read(folder)


@pytest.mark.parametrize(("kept", "refused"), [(8, False), (7, True), ("8", True)])
def test_embeddings_that_sentence_transformers_cuts_are_refused(
    tmp_path: Path, kept: Any, refused: bool
) -> None:
    """It cuts them after the last module; nothing is cut if they are no longer."""
    folder = saved(tmp_path, "bert-plain", Pooling(64, pooling_mode="mean"), Dense(64, 8))
    edit(folder, "config_sentence_transformers.json", truncate_dim=kept)
    if not refused:
        theirs = SentenceTransformer(str(folder), device="cpu")
        assert theirs.encode(TEXTS[0]).shape == (8,)
        recipe = load_checkpoint(str(folder)).recipe
        assert recipe.dimensions(64) == 8
        return
    message = f"truncate_dim {kept!r} cuts embeddings of 8 dimensions.*requests may ask for fewer"
    with pytest.raises(ExportError, match=message):
        load_checkpoint(str(folder))
