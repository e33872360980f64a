"""MobileBERT: BERT with bottlenecks, stacked feed-forward networks and trigram embeddings.

Source: Sun et al. 2020, and transformers' ``MobileBertFor*``.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.bottleneck import bottleneck_encoder
from cloze.export.blocks.config import EncoderConfig
from cloze.export.families import bert
from cloze.export.families.family import (
    Family,
    HeadSpec,
    Rename,
    Rule,
    WordPieceKind,
    layer_rules,
    refuse_settings,
)
from cloze.model_store.layouts import Layout

_FIXED: Final = {
    "trigram_input": True,
    "use_bottleneck": True,
    "use_bottleneck_attention": False,
    "key_query_shared_bottleneck": True,
    "normalization_type": "no_norm",
}
"""Settings of the published models, with transformers' defaults; others are not supported."""

_LAYER_NAMES: Final = {
    "bottleneck.input.dense": "reduce",
    "bottleneck.input.LayerNorm": "reduce_norm",
    "bottleneck.attention.dense": "shared",
    "bottleneck.attention.LayerNorm": "shared_norm",
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "output.bottleneck.dense": "expand",
    "output.bottleneck.LayerNorm": "output_norm",
}
_NETWORK_NAMES: Final = {
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm",
}


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in a ``config.json``; see `bert.read_sizes`."""
    refuse_settings(config, _FIXED)
    hidden, width = config["hidden_size"], config["embedding_size"]
    if width > hidden:
        raise ValueError(f"embedding_size {width!r} is more than hidden_size {hidden!r}")
    if (bottleneck := config["intra_bottleneck_size"]) is None:
        raise ValueError("intra_bottleneck_size must be a number, got None")
    return bert.read_sizes(
        "mobilebert",
        {"hidden_act": "relu"} | dict(config),
        embedding_size=width,
        bottleneck=bottleneck,
        feed_forwards=config.get("num_feedforward_networks", 4),
        pooler=config.get("classifier_activation", True),
    )


def _rules(config: EncoderConfig) -> tuple[Rule, ...]:
    last = config.feed_forwards - 1
    networks = ["", *(f"ffn.{number}." for number in range(last))]
    names = _LAYER_NAMES | {
        f"{prefix}{theirs}": f"networks.{(number - 1) % config.feed_forwards}.{ours}"
        for number, prefix in enumerate(networks)
        for theirs, ours in _NETWORK_NAMES.items()
    }
    return (
        *bert.EMBEDDING_RULES,
        Rename("embeddings.embedding_transformation.{p}", "encoder.embeddings.projection.{p}"),
        *layer_rules("encoder.layer.*", names),
    )


def _heads() -> dict[str, HeadSpec]:
    """Return BERT's heads, with a pooler only if the settings say so."""
    heads = bert.heads("mobilebert.")
    pooler = frozenset({"pooler.weight", "pooler.bias"})
    for name in ("next_sentence", "sequence_classification"):
        heads[name] = HeadSpec(heads[name].tensors, optional=pooler)
    heads["masked_lm"] = HeadSpec(bert.MASKED_LM | {"cls.predictions.dense.weight": "rest"})
    return heads


FAMILY: Final = Family(
    name="mobilebert",
    read_config=read_config,
    encoder=bottleneck_encoder,
    prefix="mobilebert.",
    rules=_rules,
    heads=_heads(),
    class_prefix="MobileBert",
    defaults=bert.DEFAULTS,
    wordpiece=WordPieceKind("MobileBertTokenizer"),
    layouts=frozenset({Layout.DENSE}),
    dense_because="without normalisation its states grow beyond the largest fp16 number",
)
