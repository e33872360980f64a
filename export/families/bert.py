"""BERT: the names of sizes and tensors in its checkpoints.

Source: google-research/bert, and transformers' ``BertFor*``.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import post_norm_encoder
from cloze.export.families.family import Family, HeadSpec, Rename, layer_rules


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


FAMILY: Final = Family(
    name="bert",
    read_config=read_config,
    write_config=write_config,
    encoder=post_norm_encoder,
    prefix="bert.",
    rules=(
        Rename("embeddings.word_embeddings.weight", "encoder.embeddings.word.weight"),
        Rename("embeddings.position_embeddings.weight", "encoder.embeddings.position.weight"),
        Rename("embeddings.token_type_embeddings.weight", "encoder.embeddings.token_type.weight"),
        Rename("embeddings.LayerNorm.{p}", "encoder.embeddings.norm.{p}"),
        *LAYER_RULES,
    ),
    heads={
        "masked_lm": HeadSpec(
            {
                "cls.predictions.transform.dense.{p}": "transform.{p}",
                "cls.predictions.transform.LayerNorm.{p}": "norm.{p}",
                "cls.predictions.decoder.{p}": "decoder.{p}",
                "cls.predictions.bias": "decoder.bias",
            }
        ),
        "next_sentence": HeadSpec(
            {
                "bert.pooler.dense.{p}": "pooler.{p}",
                "cls.seq_relationship.{p}": "classifier.{p}",
            }
        ),
        "span": HeadSpec({"qa_outputs.{p}": "classifier.{p}"}),
        "sequence_classification": HeadSpec(
            {"bert.pooler.dense.{p}": "pooler.{p}", "classifier.{p}": "classifier.{p}"}
        ),
        "token_classification": HeadSpec({"classifier.{p}": "classifier.{p}"}),
    },
    classes={
        frozenset({"masked_lm", "next_sentence"}): "BertForPreTraining",
        frozenset({"masked_lm"}): "BertForMaskedLM",
        frozenset({"next_sentence"}): "BertForNextSentencePrediction",
        frozenset({"span"}): "BertForQuestionAnswering",
    },
    class_prefix="Bert",
    wordpiece_class="BertTokenizer",
)
