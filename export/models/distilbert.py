"""DistilBERT: BERT without token types and pooler, and the names in its checkpoints.

Source: Sanh et al. 2019, and transformers' ``DistilBertFor*``.
"""

from collections.abc import Mapping
from typing import Any

from cloze.export.models.config import EncoderConfig, Family


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in the ``config.json`` of a DistilBERT checkpoint.

    Raises:
        KeyError: a size is missing.
    """
    return EncoderConfig(
        family="distilbert",
        vocab_size=config["vocab_size"],
        hidden_size=config["dim"],
        layers=config["n_layers"],
        heads=config["n_heads"],
        intermediate_size=config["hidden_dim"],
        max_positions=config["max_position_embeddings"],
        type_vocab_size=0,
        activation=config.get("activation", "gelu"),
        layer_norm_eps=1e-12,
        dropout=config.get("dropout", 0.1),
    )


def write_config(config: EncoderConfig) -> dict[str, Any]:
    """Return the ``config.json`` of an encoder with these sizes."""
    return {
        "architectures": ["DistilBertForMaskedLM"],
        "model_type": "distilbert",
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "n_layers": config.layers,
        "n_heads": config.heads,
        "hidden_dim": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "activation": config.activation,
        "dropout": config.dropout,
        "attention_dropout": config.dropout,
        "pad_token_id": 0,
    }


FAMILY = Family(
    name="distilbert",
    read_config=read_config,
    write_config=write_config,
    prefix="distilbert.",
    names={
        "embeddings.word_embeddings.weight": "encoder.embeddings.word.weight",
        "embeddings.position_embeddings.weight": "encoder.embeddings.position.weight",
        "embeddings.LayerNorm.{p}": "encoder.embeddings.norm.{p}",
        "transformer.layer.*.attention.q_lin.{p}": "encoder.layers.*.attention.query.{p}",
        "transformer.layer.*.attention.k_lin.{p}": "encoder.layers.*.attention.key.{p}",
        "transformer.layer.*.attention.v_lin.{p}": "encoder.layers.*.attention.value.{p}",
        "transformer.layer.*.attention.out_lin.{p}": "encoder.layers.*.attention.output.{p}",
        "transformer.layer.*.sa_layer_norm.{p}": "encoder.layers.*.attention_norm.{p}",
        "transformer.layer.*.ffn.lin1.{p}": "encoder.layers.*.up.{p}",
        "transformer.layer.*.ffn.lin2.{p}": "encoder.layers.*.down.{p}",
        "transformer.layer.*.output_layer_norm.{p}": "encoder.layers.*.output_norm.{p}",
    },
)
