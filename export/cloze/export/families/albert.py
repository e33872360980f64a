"""ALBERT: BERT with narrow embeddings and with layers that share their weights.

Source: Lan et al. 2020, and transformers' ``AlbertFor*``.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import Embeddings, Encoder
from cloze.export.blocks.layer import Layer
from cloze.export.families import bert
from cloze.export.families.family import Family, Rename, Rule, classifier, lm_head

_LAYER_NAMES: Final = {
    "attention.query": "attention.query",
    "attention.key": "attention.key",
    "attention.value": "attention.value",
    "attention.dense": "attention.output",
    "attention.LayerNorm": "attention_norm",
    "ffn": "up",
    "ffn_output": "down",
    "full_layer_layer_norm": "output_norm",
}


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in a ``config.json``; see `bert.read_sizes`.

    Embeddings are projected even if they have the hidden size.
    """
    groups, inner = config.get("num_hidden_groups", 1), config.get("inner_group_num", 1)
    if groups > config["num_hidden_layers"]:
        raise ValueError(
            f"num_hidden_groups {groups} is more than num_hidden_layers "
            f"{config['num_hidden_layers']}"
        )
    return bert.read_sizes(
        "albert",
        {"hidden_act": "gelu_new"} | dict(config),
        layers=config["num_hidden_layers"] * inner,
        embedding_size=config["embedding_size"],
        layer_groups=groups,
        group_layers=inner,
    )


def _passes(config: EncoderConfig) -> Iterator[tuple[int, int]]:
    """Yield the group and the number within the group of each layer that a text passes."""
    passes, groups = config.layers // config.group_layers, config.layer_groups or 1
    for number in range(passes):
        for inner in range(config.group_layers):
            yield int(number / (passes / groups)), inner


def encoder(config: EncoderConfig) -> Encoder:
    """Return the encoder of Lan et al. 2020: a group of layers runs several times in a row."""
    layers: dict[tuple[int, int], Layer] = {}
    order = list(_passes(config))
    for place in order:
        if place not in layers:
            layers[place] = Layer(config)
    return Encoder(Embeddings(config), (layers[place] for place in order))


def _rules(config: EncoderConfig) -> tuple[Rule, ...]:
    first: dict[tuple[int, int], int] = {}
    for number, place in enumerate(_passes(config)):
        first.setdefault(place, number)
    return (
        *bert.EMBEDDING_RULES,
        Rename("encoder.embedding_hidden_mapping_in.{p}", "encoder.embeddings.projection.{p}"),
        *(
            Rename(
                f"encoder.albert_layer_groups.{group}.albert_layers.{inner}.{theirs}.{{p}}",
                f"encoder.layers.{number}.{ours}.{{p}}",
            )
            for (group, inner), number in first.items()
            for theirs, ours in _LAYER_NAMES.items()
        ),
    )


FAMILY: Final = Family(
    name="albert",
    read_config=read_config,
    encoder=encoder,
    prefix="albert.",
    rules=_rules,
    heads={
        "masked_lm": lm_head(
            "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"
        ),
        "sequence_classification": classifier("albert.pooler"),
        **bert.TOKEN_HEADS,
    },
    class_prefix="Albert",
    defaults=bert.DEFAULTS,
    sentencepiece_class="AlbertTokenizer",
)
