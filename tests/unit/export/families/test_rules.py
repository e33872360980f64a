"""Rules of tensors: what is read from a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from cloze.export.blocks.config import EncoderConfig
from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES, Family
from cloze.export.families.family import Rule, Split
from cloze.export.load.weights import load_model

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


def read(rule: Rule, checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors; what is added is added."""
    ours: dict[str, Tensor] = {}
    for name, tensor in checkpoint.items():
        for target in rule.read(name):
            value = target.convert(tensor)
            ours[target.name] = ours[target.name] + value if target.is_added else value
    return ours


# ---- rules in a family -------------------------------------------------------------------------


def packed_family() -> Family:
    """BERT with packed queries, keys and values."""
    family = FAMILIES["bert"]
    theirs, ours = "encoder.layer.*.attention.Wqkv.{p}", "encoder.layers.*.attention"
    packed = Split(theirs, tuple(f"{ours}.{part}.{{p}}" for part in ("query", "key", "value")))
    return replace(family, rules=lambda config: (*family.rules(config), packed))


def checkpoint() -> tuple[BertModel, dict[str, Tensor]]:
    """Return a BERT of transformers, and its tensors with packed queries, keys and values."""
    torch.manual_seed(1)
    sizes = BertConfig(
        vocab_size=12,
        hidden_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    network = BertModel(sizes, add_pooling_layer=False).eval()
    tensors = {f"bert.{name}": tensor for name, tensor in network.state_dict().items()}
    for layer, kind in product(range(2), ("weight", "bias")):
        attention = f"bert.encoder.layer.{layer}.attention"
        names = [f"{attention}.self.{part}.{kind}" for part in ("query", "key", "value")]
        tensors[f"{attention}.Wqkv.{kind}"] = torch.cat([tensors.pop(name) for name in names])
    return network, tensors


@torch.no_grad()
def test_a_family_with_packed_weights_is_read() -> None:
    network, tensors = checkpoint()
    loaded, _ = load_model(tensors, packed_family(), CONFIG, {})
    ids = torch.tensor([[2, 7, 9, 3]])
    torch.testing.assert_close(loaded.eval()(ids), network(ids).last_hidden_state)


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
    _, tensors = checkpoint()
    full = f"bert.encoder.layer.0.{name}"
    if shape is None:
        del tensors[full]
    else:
        tensors[full] = torch.zeros(shape)
    with pytest.raises(ExportError, match=message):
        load_model(tensors, packed_family(), CONFIG, {})


@pytest.mark.parametrize("shape", [(1, 3), (1,), ()])
def test_a_folded_row_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    config = replace(CONFIG, family="roberta", type_vocab_size=0)
    tensors = {
        "roberta.embeddings.position_embeddings.weight": torch.zeros(10, 4),
        "roberta.embeddings.token_type_embeddings.weight": torch.zeros(shape),
    }
    with pytest.raises(ExportError, match=r"the row that is added|has shape"):
        load_model(tensors, FAMILIES["roberta"], config, {})
