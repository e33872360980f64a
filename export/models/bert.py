"""BERT: the names of sizes and tensors in its checkpoints.

Source: google-research/bert, and transformers' ``BertFor*``.
"""

from collections.abc import Mapping
from typing import Any

from cloze.export.models.config import EncoderConfig, Family


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in the ``config.json`` of a BERT checkpoint.

    Raises:
        KeyError: a size is missing.
        ValueError: a setting names another architecture than the paper's, or a size is invalid.
    """
    if (kind := config.get("position_embedding_type", "absolute")) not in ("absolute", None):
        raise ValueError(f"position_embedding_type {kind!r} is not supported (only 'absolute')")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ValueError(
            "a BERT decoder (is_decoder, add_cross_attention) is not supported, only encoders"
        )
    return EncoderConfig(
        family="bert",
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        intermediate_size=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        type_vocab_size=config.get("type_vocab_size", 2),
        activation=config.get("hidden_act", "gelu"),
        layer_norm_eps=config.get("layer_norm_eps", 1e-12),
        dropout=config.get("hidden_dropout_prob", 0.1),
    )


def write_config(config: EncoderConfig) -> dict[str, Any]:
    """Return the ``config.json`` of an encoder with these sizes."""
    return {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.type_vocab_size,
        "hidden_act": config.activation,
        "layer_norm_eps": config.layer_norm_eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "pad_token_id": 0,
    }


FAMILY = Family(
    name="bert",
    read_config=read_config,
    write_config=write_config,
    prefix="bert.",
    names={
        "embeddings.word_embeddings.weight": "encoder.embeddings.word.weight",
        "embeddings.position_embeddings.weight": "encoder.embeddings.position.weight",
        "embeddings.token_type_embeddings.weight": "encoder.embeddings.token_type.weight",
        "embeddings.LayerNorm.{p}": "encoder.embeddings.norm.{p}",
        "encoder.layer.*.attention.self.query.{p}": "encoder.layers.*.attention.query.{p}",
        "encoder.layer.*.attention.self.key.{p}": "encoder.layers.*.attention.key.{p}",
        "encoder.layer.*.attention.self.value.{p}": "encoder.layers.*.attention.value.{p}",
        "encoder.layer.*.attention.output.dense.{p}": "encoder.layers.*.attention.output.{p}",
        "encoder.layer.*.attention.output.LayerNorm.{p}": "encoder.layers.*.attention_norm.{p}",
        "encoder.layer.*.intermediate.dense.{p}": "encoder.layers.*.up.{p}",
        "encoder.layer.*.output.dense.{p}": "encoder.layers.*.down.{p}",
        "encoder.layer.*.output.LayerNorm.{p}": "encoder.layers.*.output_norm.{p}",
    },
)
