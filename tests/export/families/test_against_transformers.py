"""Each family's torch module gives the numbers of transformers, with every head and with adapters.

All weights are random, biases and norms included: transformers' defaults of 0 and 1 hide errors.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from cloze.export.adapters import ALL_LAYERS, AdaptedModel
from cloze.export.blocks import disentangled
from cloze.export.blocks.config import RelativePositions
from cloze.export.blocks.relative_bias import bucket
from cloze.export.check.verify import TOLERANCES, GraphUnderTest
from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.graph.session import open_session
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.load.source import read_tensors
from cloze.export.load.weights import load_model
from cloze.export.model import GraphWriter
from tests.support.family_checkpoints import (
    CLASSES,
    OWN,
    TOKENIZERS,
    WITHOUT_QUESTIONS,
    ids_of,
    longest,
    ours,
    same,
    save,
    settings_of,
    theirs,
)
from tests.support.tokenizer_kinds import mpnet_wordpiece, unigram, wordpiece


def set_config(folder: Path, **settings: Any) -> None:
    """Change settings; the value ``...`` removes one."""
    changed = json.loads((folder / "config.json").read_text()) | settings
    kept = {name: value for name, value in changed.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def check_same(network: Any, loaded: Any, head: str, *lengths: int, texts: int = 1) -> None:
    """Compare the output of a head for texts of some lengths."""
    for tokens in lengths:
        ids = ids_of(network, tokens, texts=texts)
        assert same(ours(loaded, head, ids), theirs(network, head, ids)), tokens


CASES = [
    (family, head)
    for family in FAMILIES
    for head in CLASSES
    if head != "span" or family not in WITHOUT_QUESTIONS
]


@pytest.mark.parametrize(("family", "head"), CASES)
def test_every_head_gives_the_numbers_of_transformers(family: str, head: str, built: Any) -> None:
    network, checkpoint, _ = built(family, head)
    check_same(network, checkpoint, head, 1, 2, 17, longest(network))
    assert checkpoint.model.config.max_positions == longest(network)
    with pytest.raises((IndexError, RuntimeError)):
        checkpoint.model(ids_of(network, longest(network) + 1))


WITH_TYPES = {"bert", "ernie", "electra", "albert", "mobilebert", "nomic_bert", "gte"}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_layers_types_and_padding_are_those_of_transformers(family: str, built: Any) -> None:
    network, checkpoint, _ = built(family)
    model, ids = checkpoint.model, ids_of(network, 12)
    states = network(ids, output_hidden_states=True).hidden_states
    assert same(torch.stack(model.encoder.states(ids)), torch.stack(states))
    if family in WITH_TYPES:
        types = (torch.arange(12) > 4).long().expand_as(ids)
        expected = network(ids, token_type_ids=types).logits
        assert same(model.masked_lm(model(ids, types)), expected)
        assert not same(ours(checkpoint, "masked_lm", ids), expected)
    if family == "mobilebert":  # its embeddings read the next token all the same
        return
    mask = torch.arange(12)[None, :] < torch.tensor([[12], [7], [1]])
    batch = model(ids, attention_mask=mask)
    for row, length in enumerate((12, 7, 1)):
        assert same(batch[row, :length], model(ids[row : row + 1, :length])[0])


DEBERTAS: dict[str, dict[str, Any]] = {
    "large-v2": {
        "conv_kernel_size": 3, "conv_act": "gelu", "position_biased_input": True,
        "type_vocab_size": 2, "embedding_size": 16,
    },
    "groups": {"conv_kernel_size": 5, "conv_groups": 4},
    "own-projections": {"share_att_key": False, "pos_att_type": "c2p|p2c"},
    "c2p": {"share_att_key": False, "pos_att_type": ["c2p"]},
    "p2c": {"pos_att_type": ["p2c"], "norm_rel_ebd": "none"},
    "no-buckets": {"position_buckets": -1, "max_relative_positions": 12},
    "new-lm-head": {"legacy": False},
}  # fmt: skip


@pytest.mark.parametrize("name", DEBERTAS)
def test_every_deberta_gives_the_numbers_of_transformers(name: str, tmp_path: Path) -> None:
    network = save("deberta-v2", "masked_lm", tmp_path / "one", **DEBERTAS[name])
    checkpoint = load_checkpoint(str(tmp_path / "one"))
    assert checkpoint.broken_promise == ""
    check_same(network, checkpoint, "masked_lm", 1, 2, 17, longest(network))
    ids = ids_of(network, 21)
    mask = torch.arange(21)[None, :] < torch.tensor([[21], [13], [1]])
    with torch.no_grad():
        padded = network(ids, attention_mask=mask.long()).logits
        mine = checkpoint.model.masked_lm(checkpoint.model(ids, attention_mask=mask))
    assert same(mine[mask], padded[mask])


def test_types_that_a_family_does_not_take_are_named(built: Any, copied: Any) -> None:
    _, folder = copied("camembert")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert not any("type 0 for all" in note for note in built("camembert")[1].notes)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B:1 </s>:1",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = load_checkpoint(str(folder))
    assert loaded.tokenizer.special.second_type == 0
    assert any("a camembert takes type 0 for all tokens" in note for note in loaded.notes)


ALL_BIASES = {
    "attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True,
}  # fmt: skip
OTHER_MODERN: list[dict[str, Any]] = [
    ALL_BIASES,
    {"layer_types": None, "global_attn_every_n_layers": 2, "num_hidden_layers": 5},
]


@pytest.mark.parametrize("head", ["masked_lm", "sequence_classification"])
@pytest.mark.parametrize("settings", OTHER_MODERN, ids=lambda one: next(iter(one)))
def test_settings_of_local_layers_are_those_of_transformers(
    settings: dict[str, Any], head: str, tmp_path: Path
) -> None:
    network = save("modernbert", head, tmp_path / "checkpoint", **settings)
    check_same(network, load_checkpoint(str(tmp_path / "checkpoint")), head, 30)


def test_a_sliding_window_goes_before_the_local_attention(copied: Any) -> None:
    """transformers reads both, and writes the second."""
    network, folder = copied("modernbert")
    set_config(folder, sliding_window=2)
    again = CLASSES["masked_lm"].from_pretrained(folder, attn_implementation="eager").eval()
    ids = ids_of(network, 17)
    mine = ours(load_checkpoint(str(folder)), "masked_lm", ids)
    assert same(mine, theirs(again, "masked_lm", ids))
    assert not same(mine, theirs(network, "masked_lm", ids))


@pytest.mark.parametrize("tokens", [65, 129, 130, 300])
def test_lengths_around_the_window_are_those_of_transformers(tokens: int, tmp_path: Path) -> None:
    longer = {"max_position_embeddings": 300, "local_attention": 128}
    network = save("modernbert", "masked_lm", tmp_path, **longer)
    check_same(network, load_checkpoint(str(tmp_path)), "masked_lm", tokens, texts=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_without_the_prefix_and_of_older_files_are_read(family: str, copied: Any) -> None:
    network, folder = copied(family, "token_classification")
    file = folder / "model.safetensors"
    tensors = read_tensors([file])
    prefix = FAMILIES[family].prefix
    older = {
        name.removeprefix(prefix)
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): tensor.half()
        for name, tensor in tensors.items()
    } | {"embeddings.position_ids": torch.arange(30)[None]}
    assert set(older) != set(tensors)
    save_file({name: one.contiguous() for name, one in older.items()}, str(file), {"format": "pt"})
    checkpoint = load_checkpoint(str(folder))
    with torch.no_grad():
        for parameter in network.parameters():  # not the buffers, which no file holds
            parameter.copy_(parameter.half())
    check_same(network, checkpoint, "token_classification", 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_tensor_of_the_encoder_is_named(family: str, built: Any) -> None:
    _, checkpoint, folder = built(family, "token_classification")
    tensors = dict(read_tensors([folder / "model.safetensors"]))
    names = [name for name in tensors if name.startswith(FAMILIES[family].prefix)]
    for name in names:
        others = {key: value for key, value in tensors.items() if key != name}
        with pytest.raises(ExportError, match="the checkpoint lacks"):
            load_model(others, FAMILIES[family], checkpoint.model.config, {})


def test_buckets_of_distances_are_those_of_transformers() -> None:
    distances = torch.arange(-700, 701)
    expected = MPNetEncoder.relative_position_bucket(distances, num_buckets=32, max_distance=128)
    assert torch.equal(bucket(distances), expected)
    assert bucket(torch.tensor([8, 11, 12, 91, 127, 128, 5000])).tolist() == [
        24, 24, 25, 31, 31, 31, 31,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("buckets", "distances"), [(256, 512), (256, 1024), (8, 30), (6, 512), (0, 512), (0, 40)]
)
def test_buckets_of_deberta_are_those_of_transformers(buckets: int, distances: int) -> None:
    sizes = RelativePositions(distances=distances, buckets=buckets, terms=("c2p",))
    apart = torch.arange(-700, 701)
    theirs = make_log_bucket_position(apart, buckets, distances).long() if buckets else apart
    reach = buckets or distances
    expected = (theirs + reach).clamp(0, 2 * reach - 1)
    assert torch.equal(disentangled.bucket(apart, sizes), expected)


def test_a_deberta_fills_masks_only_with_the_head_that_its_settings_declare(tmp_path: Path) -> None:
    """Microsoft's files hold the new head, and their settings say nothing of it."""
    save("deberta-v2", "masked_lm", tmp_path, legacy=False)
    assert load_checkpoint(str(tmp_path)).model.masked_lm is not None
    set_config(tmp_path, legacy=...)
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.model.masked_lm is None
    [note] = [note for note in checkpoint.notes if note.startswith("fill-mask")]
    assert re.search("does not declare .*lm_predictions.* random weights", note)
    assert "fill-mask" in checkpoint.broken_promise


def test_a_discriminator_does_not_fill_masks(copied: Any) -> None:
    _, folder = copied("electra")
    network = transformers.ElectraForPreTraining(settings_of("electra", wordpiece()))
    network.save_pretrained(folder)
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.model.masked_lm is None
    [note] = [note for note in checkpoint.notes if note.startswith("fill-mask")]
    assert re.search("is a discriminator.* the generator", note)
    assert "fill-mask" in checkpoint.broken_promise


DECODERS = ("decoder.weight", "generator_lm_head.weight", "vocab_projector.weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untied_decoder_that_is_missing_fills_no_masks(family: str, copied: Any) -> None:
    """transformers would fill it at random; tied, as by default, it is not in the file."""
    network, folder = copied(family)
    tensors = read_tensors([folder / "model.safetensors"])
    assert not any(name.endswith(DECODERS) for name in tensors), "a tied one is not saved"
    for untied in (None, False):
        set_config(folder, tie_word_embeddings=untied)
        checkpoint = load_checkpoint(str(folder))
        assert checkpoint.model.masked_lm is None
    assert any("fill-mask is not offered: config.json" in note for note in checkpoint.notes)
    ids = ids_of(network, 9)
    with torch.no_grad():
        assert same(checkpoint.model(ids), network.base_model(ids).last_hidden_state)


BIASES = {
    "roberta": "lm_head.bias", "xlm-roberta": "lm_head.bias", "mpnet": "lm_head.bias",
    "bert": "cls.predictions.bias", "albert": "predictions.bias",
    "deberta-v2": "cls.predictions.bias",
}  # fmt: skip
"""Names of the bias that a tied decoder has, too."""


@pytest.fixture(params=BIASES)
def biased(request: Any, copied: Any) -> tuple[Any, Path, dict[str, Tensor], str]:
    """Return a network, its folder and tensors, and the name of its bias."""
    network, folder = copied(request.param)
    tensors = dict(read_tensors([folder / "model.safetensors"]))
    return network, folder, tensors, BIASES[request.param]


def test_of_two_biases_that_differ_transformers_adds_the_decoder_s_and_we_refuse(
    biased: Any,
) -> None:
    network, folder, tensors, name = biased
    own = name.replace("bias", "decoder.bias")
    tensors[own] = tensors[name] + torch.linspace(-1, 1, len(tensors[name]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    again = CLASSES["masked_lm"].from_pretrained(folder, attn_implementation="eager").eval()
    ids = ids_of(network, 9)
    expected = theirs(network, "masked_lm", ids) - tensors[name] + tensors[own]
    assert same(theirs(again, "masked_lm", ids), expected)
    with pytest.raises(ExportError, match=f"{own} and {name} should be one tensor, but differ"):
        load_checkpoint(str(folder))
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert same(ours(load_checkpoint(str(folder)), "masked_lm", ids), expected)


def test_the_order_of_sentences_is_no_promise_of_the_next_sentence(copied: Any) -> None:
    _, folder = copied("albert")
    network = transformers.AlbertForPreTraining(settings_of("albert", unigram()))
    network.save_pretrained(folder)
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.broken_promise == ""
    assert checkpoint.model.masked_lm is not None
    assert any("sop_classifier" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("bert", {"auto_map": {"AutoModel": "x/jina-bert--modeling.JinaBert"}}, "auto_map"),
        ("bert", {"is_decoder": True}, "decoder"),
        ("roberta", {"add_cross_attention": True}, "decoder"),
        ("ernie", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("xlm-roberta", {"pad_token_id": 0}, "pad_token_id is 0, but .* has the id 1"),
        ("roberta", {"pad_token_id": -1}, "pad_token_id: .* greater than or equal to 0, got -1"),
        ("deberta-v2", {"pos_att_type": ["p2p"]}, "p2p"),
        ("deberta-v2", {"attention_head_size": 16}, "attention_head_size 16"),
        ("deberta-v2", {"conv_kernel_size": 4}, "4 tokens has no middle"),
        ("camembert", {"quantization_config": {"bits": 8}}, "quantised"),
        ("modernbert", {"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 9.0}}},
            "rope_type 'yarn'",
        ),
    ],
)
def test_another_architecture_is_refused_by_name(
    family: str, settings: dict[str, Any], message: str, copied: Any
) -> None:
    _, folder = copied(family)
    set_config(folder, **settings)
    with pytest.raises(ExportError, match=message):
        load_checkpoint(str(folder))


@pytest.mark.parametrize("family", ["roberta", "bert"])
def test_a_family_takes_a_tokenizer_of_another_kind(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As camembertv2, a RoBERTa with WordPiece, and multilingual-e5-small, a BERT with Unigram."""
    kind = {"roberta": mpnet_wordpiece, "bert": unigram}[family]
    monkeypatch.setitem(TOKENIZERS, family, kind)
    network = save(family, "masked_lm", tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    check_same(network, checkpoint, "masked_lm", 9)
    for texts in (("Where is it?",), ("Where is it?", "The bank charges a fee.")):
        own = checkpoint.tokenizer.tokenizer.encode(*texts)
        assert own.ids == kind().encode(*texts).ids
    separators = checkpoint.tokenizer.special.separators
    assert (separators, checkpoint.tokenizer.special.second_type) == (2, 0)


@pytest.mark.parametrize("padding_id", [0, 3])
def test_positions_begin_after_the_padding_token_whatever_its_id_is(
    padding_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As camembertv2-base, whose padding token has the id 0."""
    names = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names.insert(padding_id, "[PAD]")
    backend = wordpiece(tuple(names))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] [SEP] $B [SEP]",
        special_tokens=[(one, names.index(one)) for one in ("[CLS]", "[SEP]")],
    )
    monkeypatch.setitem(TOKENIZERS, "roberta", lambda: backend)
    network = save("roberta", "masked_lm", tmp_path, pad_token_id=padding_id)
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.model.config.padding_id == padding_id
    positions = network.config.max_position_embeddings - padding_id - 1
    assert checkpoint.model.config.max_positions == positions
    check_same(network, checkpoint, "masked_lm", 9, positions)


@pytest.mark.parametrize("shape", [(1, 3), (1,), ()])
def test_a_folded_row_of_another_width_is_refused(shape: tuple[int, ...], copied: Any) -> None:
    _, folder = copied("roberta")
    file = folder / "model.safetensors"
    tensors = dict(read_tensors([file]))
    tensors["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(shape)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ExportError, match=r"the row that is added|has shape"):
        load_checkpoint(str(folder))


REFUSED = {"deberta-v2"}
"""Families whose graphs have constants that depend on queries and keys."""


@pytest.mark.parametrize("family", OWN)
def test_a_graph_with_adapters_computes_what_torch_does(
    family: str, built: Any, tmp_path: Path
) -> None:
    _, checkpoint, _ = built(family)
    adapted = AdaptedModel.of(checkpoint.model, [ALL_LAYERS])
    writer = GraphWriter(checkpoint.model, EmbeddingRecipe(), checkpoint.heads, tmp_path)
    graph = writer.write(adapted=adapted.numbers)
    session = open_session(tmp_path / graph.file, graph.layout)
    spec = GraphUnderTest(graph, checkpoint, checkpoint.heads, 32).spec
    if family in REFUSED:
        with pytest.raises(ExportError, match=f"a {family} with adapters .* leave out --adapters"):
            adapted.verify(session, spec, TOLERANCES[graph.precision])
    else:
        assert adapted.verify(session, spec, TOLERANCES[graph.precision]) < 1e-5
