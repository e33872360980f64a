"""What families read from and write to ``config.json``, and the names that transformers has."""

from typing import Any

import pytest
import transformers

from cloze.export.families import FAMILIES, Family
from tests.unit.export.families.test_against_transformers import OWN, SIZES

NEEDED = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "dim", "n_layers", "n_heads", "hidden_dim", "embedding_size",
    "intra_bottleneck_size", "rope_parameters", "norm_eps",
    "relative_attention", "pos_att_type", "layer_norm_eps", "type_vocab_size",
}  # fmt: skip
"""Sizes without a default in `read_config`."""


def settings(family: str) -> dict[str, Any]:
    given = {"vocab_size": 50} | SIZES | OWN[family]
    return transformers.CONFIG_MAPPING[family](**{"pad_token_id": 1} | given).to_dict()


def only_needed(family: str) -> dict[str, Any]:
    return {key: value for key, value in settings(family).items() if key in NEEDED}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_settings_that_are_left_out_have_the_values_of_the_paper(family: Family) -> None:
    config = family.read_config(only_needed(family.name))
    key = {"distilbert": "activation", "modernbert": "hidden_activation"}
    theirs = transformers.CONFIG_MAPPING[family.name]()
    assert config.activation == getattr(theirs, key.get(family.name, "hidden_act"))
    assert config.group_layers == 1
    assert not config.task_types
    if family.name == "mobilebert":
        assert config.feed_forwards == theirs.num_feedforward_networks
    assert config.layer_groups == (1 if family.name == "albert" else None)


def test_settings_that_a_modernbert_leaves_out_are_those_of_transformers() -> None:
    theirs = transformers.ModernBertConfig(num_hidden_layers=7)
    needed = only_needed("modernbert") | {"num_hidden_layers": 7}
    config = FAMILIES["modernbert"].read_config(needed)
    assert [theirs.layer_types[number] == "sliding_attention" for number in range(7)] == list(
        config.local_layers
    )
    assert config.window == theirs.local_attention // 2
    assert config.classifier_pooling == theirs.classifier_pooling
    assert config.head_activation == theirs.classifier_activation
    for part, flag in (
        ("attention", "attention_bias"), ("up", "mlp_bias"), ("down", "mlp_bias"),
        ("norm", "norm_bias"), ("head", "classifier_bias"), ("decoder", "decoder_bias"),
    ):  # fmt: skip
        assert config.has_bias(part) == getattr(theirs, flag), flag


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"distilbert"}))
def test_an_epsilon_without_a_default_must_be_given(name: str) -> None:
    given, key = only_needed(name), "norm_eps" if name == "modernbert" else "layer_norm_eps"
    del given[key]
    with pytest.raises(KeyError, match=key):
        FAMILIES[name].read_config(given)


def test_every_class_that_a_family_names_is_one_of_transformers(family: Family) -> None:
    tokenizers = [family.sentencepiece_class, family.byte_level_class]
    tokenizers += [family.wordpiece.name] if family.wordpiece else []
    names = [f"{family.class_prefix}Model", *filter(None, tokenizers)]
    assert [name for name in names if not hasattr(transformers, name)] == []


def test_code_of_a_tokenizer_is_no_code_of_a_model() -> None:
    """It is not run either; the tokenizer's file says what it does."""
    given = settings("bert")
    FAMILIES["bert"].read_config(
        given | {"auto_map": {"AutoTokenizer": "x.Y", "AutoConfig": "x.Z"}}
    )
    for name in ("AutoModel", "AutoModelForMaskedLM"):
        with pytest.raises(ValueError, match=rf"auto_map: {name}\)"):
            FAMILIES["bert"].read_config(given | {"auto_map": {"AutoConfig": "x.Z", name: "x.Y"}})
