"""BERT: the names of sizes and tensors in its checkpoints, which its kin share in part.

Source: google-research/bert, and transformers' ``BertFor*``.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import post_norm_encoder
from cloze.export.families.family import (
    Family,
    HeadSpec,
    Rename,
    WordPieceKind,
    classifier,
    layer_rules,
    refuse_settings,
)

DEFAULTS: Final = {
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
"""What transformers takes for settings that a ``config.json`` lacks, in BERT and its kin."""


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in the ``config.json`` of a BERT checkpoint; see `read_sizes`."""
    return read_sizes("bert", config)


def read_sizes(family: str, config: Mapping[str, Any], **others: Any) -> EncoderConfig:
    """Return the sizes in the ``config.json`` of a family that has BERT's names for them.

    Args:
        others: sizes that the settings do not have under these names.

    Raises:
        KeyError: a size is missing.
        ValueError: a setting names another architecture than the paper's, or a size is invalid.
    """
    refuse_settings(config, {"position_embedding_type": "absolute"})
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ValueError(
            "a decoder (is_decoder, add_cross_attention) is not supported, only encoders"
        )
    code = [name for name in config.get("auto_map") or () if name.startswith("AutoModel")]
    if code:
        raise ValueError(
            f"the checkpoint is computed by code of its own (auto_map: {code[0]}), which is never "
            "run; only the architecture of the paper is supported"
        )
    sizes = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "intermediate_size": config["intermediate_size"],
        "max_positions": config["max_position_embeddings"],
        "activation": config.get("hidden_act", "gelu"),
        "layer_norm_eps": config["layer_norm_eps"],
    }
    if "type_vocab_size" not in others:
        sizes["type_vocab_size"] = config["type_vocab_size"]
    return EncoderConfig(family=family, **(sizes | others))


LAYER_RULES: Final = layer_rules(
    "encoder.layer.*",
    {
        "attention.self.query": "attention.query",
        "attention.self.key": "attention.key",
        "attention.self.value": "attention.value",
        "attention.output.dense": "attention.output",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "up",
        "output.dense": "down",
        "output.LayerNorm": "output_norm",
    },
)
"""The rules of the layers' tensors, whose names many families have."""

WORDS: Final = Rename("embeddings.word_embeddings.weight", "encoder.embeddings.word.weight")
POSITIONS: Final = Rename(
    "embeddings.position_embeddings.weight", "encoder.embeddings.position.weight"
)
TYPES: Final = Rename(
    "embeddings.token_type_embeddings.weight", "encoder.embeddings.token_type.weight"
)
EMBEDDING_NORM: Final = Rename("embeddings.LayerNorm.{p}", "encoder.embeddings.norm.{p}")
EMBEDDING_RULES: Final = (WORDS, POSITIONS, TYPES, EMBEDDING_NORM)
"""The rules of the embeddings' tensors, whose names many families have."""

MASKED_LM: Final = {
    "cls.predictions.transform.dense.{p}": "transform.{p}",
    "cls.predictions.transform.LayerNorm.{p}": "norm.{p}",
    "cls.predictions.decoder.{p}": "decoder.{p}",
    "cls.predictions.bias": "decoder.bias",
}
TOKEN_HEADS: Final = {
    "span": HeadSpec({"qa_outputs.{p}": "classifier.{p}"}),
    "token_classification": HeadSpec({"classifier.{p}": "classifier.{p}"}),
}
"""The heads that are one linear layer on each token, in all families."""


def heads(prefix: str) -> dict[str, HeadSpec]:
    """Return BERT's heads; see `Family` for the prefix."""
    pooler = {f"{prefix}pooler.dense.{{p}}": "pooler.{p}"}
    return {
        "masked_lm": HeadSpec(MASKED_LM),
        "next_sentence": HeadSpec(pooler | {"cls.seq_relationship.{p}": "classifier.{p}"}),
        "sequence_classification": classifier(f"{prefix}pooler.dense"),
        **TOKEN_HEADS,
    }


FAMILY: Final = Family(
    name="bert",
    read_config=read_config,
    encoder=post_norm_encoder,
    prefix="bert.",
    rules=lambda _: (*EMBEDDING_RULES, *LAYER_RULES),
    heads=heads("bert."),
    class_prefix="Bert",
    wordpiece=WordPieceKind("BertTokenizer"),
    defaults=DEFAULTS,
)
