"""DistilBERT: BERT without token types and pooler, and the names in its checkpoints.

Source: Sanh et al. 2019, and transformers' ``DistilBertFor*``.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import post_norm_encoder
from cloze.export.families import bert
from cloze.export.families.family import Family, WordPieceKind, classifier, layer_rules, lm_head


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
    )


FAMILY: Final = Family(
    name="distilbert",
    read_config=read_config,
    encoder=post_norm_encoder,
    prefix="distilbert.",
    rules=lambda _: (
        bert.WORDS,
        bert.POSITIONS,
        bert.EMBEDDING_NORM,
        *layer_rules(
            "transformer.layer.*",
            {
                "attention.q_lin": "attention.query",
                "attention.k_lin": "attention.key",
                "attention.v_lin": "attention.value",
                "attention.out_lin": "attention.output",
                "sa_layer_norm": "attention_norm",
                "ffn.lin1": "up",
                "ffn.lin2": "down",
                "output_layer_norm": "output_norm",
            },
        ),
    ),
    heads={
        "masked_lm": lm_head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
        "sequence_classification": classifier("pre_classifier", activation="relu"),
        **bert.TOKEN_HEADS,
    },
    class_prefix="DistilBert",
    defaults={"max_position_embeddings": 512},
    wordpiece=WordPieceKind("DistilBertTokenizer"),
)
