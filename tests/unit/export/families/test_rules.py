"""Rules of tensors: what is read from a checkpoint, and that writing is its inverse."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cloze.export.blocks.config import EncoderConfig
from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES, Family
from cloze.export.families.family import Fold, Rename, Rule, Slice, Split, layer_rules
from cloze.export.load.weights import load_model
from cloze.export.model import Model

CONFIG = EncoderConfig(
    family="bert",
    vocab_size=12,
    hidden_size=4,
    layers=2,
    heads=2,
    intermediate_size=8,
    max_positions=8,
    type_vocab_size=2,
)
PACKED = Split("layer.*.Wqkv.{p}", tuple(f"layers.*.{part}.{{p}}" for part in ("q", "k", "v")))


def read(rule: Rule, checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors; what is added is added."""
    ours: dict[str, Tensor] = {}
    for name, tensor in checkpoint.items():
        for target in rule.read(name):
            value = target.convert(tensor)
            ours[target.name] = ours[target.name] + value if target.is_added else value
    return ours


def written(rule: Rule, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint."""
    theirs: dict[str, Tensor] = {}
    for name in ours:
        theirs |= rule.write(name, ours) or {}
    return theirs


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_rename_keeps_the_tensor() -> None:
    rule = Rename("layer.*.dense.{p}", "layers.*.up.{p}")
    theirs = {"layer.3.dense.bias": torch.ones(2), "layer.10.dense.weight": torch.zeros(2, 2)}
    ours = read(rule, theirs)
    assert set(ours) == {"layers.3.up.bias", "layers.10.up.weight"}
    assert same(written(rule, ours), theirs)
    for other in ("layer.x.dense.bias", "layer.3.dense.scale", "a.layer.3.dense.bias"):
        assert rule.read(other) == []
    assert rule.write("layers.3.down.bias", {}) is None


def test_a_slice_leaves_rows_out_and_writes_zeros() -> None:
    rule = Slice("positions", "ours", 2)
    ours = read(rule, {"positions": torch.arange(12.0).view(6, 2)})
    assert torch.equal(ours["ours"], torch.arange(4.0, 12.0).view(4, 2))
    back = written(rule, ours)["positions"]
    assert torch.equal(back[:2], torch.zeros(2, 2))
    assert torch.equal(back[2:], ours["ours"])
    assert rule.read("other") == []
    assert rule.write("other", {}) is None


def test_a_split_gives_rows_in_order_and_joins_them_again() -> None:
    packed = {
        "layer.1.Wqkv.weight": torch.arange(18.0).view(6, 3),
        "layer.1.Wqkv.bias": torch.arange(6.0),
        "layer.2.Wqkv.bias": -torch.arange(6.0),
    }
    ours = read(PACKED, packed)
    assert torch.equal(ours["layers.1.k.weight"], packed["layer.1.Wqkv.weight"][2:4])
    assert ours["layers.2.v.bias"].tolist() == [-4.0, -5.0]
    assert len(ours) == 9
    assert same(written(PACKED, ours), packed)
    assert PACKED.write("layers.1.k.bias", ours) == {}  # written with the queries
    assert PACKED.write("layers.1.other.bias", ours) is None
    assert PACKED.read("layer.1.other.bias") == []


def test_a_fold_is_added_to_every_row_and_written_as_zeros() -> None:
    rule = Fold("types", "positions", Slice("table", "positions", 1))
    table, types = torch.arange(8.0).view(4, 2), torch.tensor([[10.0, 20.0], [7.0, 7.0]])
    ours = read(rule, {"table": table, "types": types})
    assert torch.equal(ours["positions"], table[1:] + types[0])
    back = written(rule, ours)
    assert torch.equal(back["types"], torch.zeros(1, 2))
    assert torch.equal(read(rule, back)["positions"], ours["positions"])
    assert rule.write("other", {"other": table}) is None


# ---- rules in a family -------------------------------------------------------------------------


def packed_family() -> Family:
    """BERT with packed queries, keys and values."""
    family = FAMILIES["bert"]
    theirs, ours = "encoder.layer.*.attention.Wqkv.{p}", "encoder.layers.*.attention"
    packed = Split(theirs, tuple(f"{ours}.{part}.{{p}}" for part in ("query", "key", "value")))
    return replace(family, rules=lambda config: (*family.rules(config), packed))


def checkpoint() -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(1)
    model = Model(CONFIG)
    return model, packed_family().write(dict(model.named_parameters()), CONFIG)


def test_a_family_with_packed_weights_is_read_and_written() -> None:
    model, tensors = checkpoint()
    assert not any(".query." in name for name in tensors)
    loaded, _ = load_model(tensors, packed_family(), model.config, {})
    ids = torch.tensor([[2, 7, 9, 3]])
    assert torch.equal(loaded.eval()(ids), model.eval()(ids))
    assert same(loaded.state_dict(), model.state_dict())
    names = [name for name in tensors if "Wqkv" in name]
    assert len(names) == 2 * model.config.layers


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("attention.Wqkv.weight", (7, 4), r"Wqkv.weight has shape \[7, 4\]: .* 3 equal parts"),
        ("attention.Wqkv.bias", (), r"Wqkv.bias has shape \[\]: "),
        ("attention.Wqkv.bias", (6,), r"Wqkv.bias has shape \[2\], but config.json's sizes"),
        (
            "attention.Wqkv.weight",
            None,
            r"lacks encoder.layers.0.attention.query.weight and 2 more",
        ),
    ],
)
def test_packed_weights_of_another_shape_are_refused(
    name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    model, tensors = checkpoint()
    full = f"bert.encoder.layer.0.{name}"
    if shape is None:
        del tensors[full]
    else:
        tensors[full] = torch.zeros(shape)
    with pytest.raises(ExportError, match=message):
        load_model(tensors, packed_family(), model.config, {})


@pytest.mark.parametrize("shape", [(1, 3), (1,), ()])
def test_a_folded_row_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    family = FAMILIES["roberta"]
    model = Model(replace(CONFIG, family="roberta", type_vocab_size=0))
    tensors = family.write(dict(model.named_parameters()), model.config)
    tensors["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(shape)
    with pytest.raises(ExportError, match=r"the row that is added|has shape"):
        load_model(tensors, family, model.config, {})


def test_layers_have_one_rule_per_matrix_or_norm() -> None:
    [rule] = layer_rules("encoder.layer.*", {"output.dense": "down"})
    assert read(rule, {"encoder.layer.4.output.dense.bias": torch.ones(1)}).keys() == {
        "encoder.layers.4.down.bias"
    }
