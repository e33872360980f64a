"""RoBERTa: BERT with an offset of positions and without token types.

Source: Liu et al. 2019, and transformers' ``RobertaFor*``.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import post_norm_encoder
from cloze.export.families.bert import LAYER_RULES
from cloze.export.families.family import Family, Fold, HeadSpec, Rename, Slice

_FIRST_POSITION = 2
"""The row of the first token's position. The rows up to the padding's id, 1, are unused."""


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in the ``config.json`` of a RoBERTa checkpoint.

    Raises:
        KeyError: a size is missing.
        ValueError: a setting names another architecture than the paper's, or a size is invalid.
    """
    if (kind := config.get("position_embedding_type", "absolute")) not in ("absolute", None):
        raise ValueError(f"position_embedding_type {kind!r} is not supported (only 'absolute')")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ValueError("a decoder (is_decoder, add_cross_attention) is not supported")
    if (pad := config.get("pad_token_id", 1)) != _FIRST_POSITION - 1:
        raise ValueError(f"pad_token_id {pad!r} is not supported, because positions begin after 1")
    return EncoderConfig(
        family="roberta",
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        intermediate_size=config["intermediate_size"],
        max_positions=config["max_position_embeddings"] - _FIRST_POSITION,
        type_vocab_size=0,
        activation=config.get("hidden_act", "gelu"),
        layer_norm_eps=config["layer_norm_eps"],
        dropout=config.get("hidden_dropout_prob", 0.1),
    )


def write_config(config: EncoderConfig) -> dict[str, Any]:
    """Return the ``config.json`` of an encoder with these sizes."""
    return {
        "architectures": ["RobertaForMaskedLM"],
        "model_type": "roberta",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions + _FIRST_POSITION,
        "type_vocab_size": 1,
        "hidden_act": config.activation,
        "layer_norm_eps": config.layer_norm_eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "pad_token_id": _FIRST_POSITION - 1,
    }


FAMILY: Final = Family(
    name="roberta",
    read_config=read_config,
    write_config=write_config,
    encoder=post_norm_encoder,
    prefix="roberta.",
    rules=(
        Rename("embeddings.word_embeddings.weight", "encoder.embeddings.word.weight"),
        Fold(
            "embeddings.token_type_embeddings.weight",
            "encoder.embeddings.position.weight",
            Slice(
                "embeddings.position_embeddings.weight",
                "encoder.embeddings.position.weight",
                _FIRST_POSITION,
            ),
        ),
        Rename("embeddings.LayerNorm.{p}", "encoder.embeddings.norm.{p}"),
        *LAYER_RULES,
    ),
    heads={
        "masked_lm": HeadSpec(
            {
                "lm_head.dense.{p}": "transform.{p}",
                "lm_head.layer_norm.{p}": "norm.{p}",
                "lm_head.decoder.{p}": "decoder.{p}",
                "lm_head.bias": "decoder.bias",
            },
            activation="gelu",
        ),
        "span": HeadSpec({"qa_outputs.{p}": "classifier.{p}"}),
        "sequence_classification": HeadSpec(
            {
                "classifier.dense.{p}": "pooler.{p}",
                "classifier.out_proj.{p}": "classifier.{p}",
            }
        ),
        "token_classification": HeadSpec({"classifier.{p}": "classifier.{p}"}),
    },
    classes={
        frozenset({"masked_lm"}): "RobertaForMaskedLM",
        frozenset({"span"}): "RobertaForQuestionAnswering",
    },
    class_prefix="Roberta",
)
