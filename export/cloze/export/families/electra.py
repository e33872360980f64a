"""ELECTRA: BERT with narrow embeddings and without a pooler.

Source: Clark et al. 2020, and transformers' ``ElectraFor*``.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import post_norm_encoder
from cloze.export.families import bert
from cloze.export.families.family import Family, Rename, WordPieceKind, classifier, lm_head


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in a ``config.json``; see `bert.read_sizes`.

    Embeddings of the hidden size are not projected.
    """
    width = config["embedding_size"]
    narrow = width if width != config["hidden_size"] else None
    return bert.read_sizes("electra", config, embedding_size=narrow)


FAMILY: Final = Family(
    name="electra",
    read_config=read_config,
    encoder=post_norm_encoder,
    prefix="electra.",
    rules=lambda _: (
        *bert.EMBEDDING_RULES,
        Rename("embeddings_project.{p}", "encoder.embeddings.projection.{p}"),
        *bert.LAYER_RULES,
    ),
    heads={
        "masked_lm": lm_head(
            "generator_predictions.dense",
            "generator_predictions.LayerNorm",
            "generator_lm_head",
            activation="gelu",
            without={
                "discriminator_predictions": "the checkpoint is a discriminator, which only says "
                "which words were replaced; the generator of the same name fills masks"
            },
        ),
        "sequence_classification": classifier(
            "classifier.dense", "classifier.out_proj", activation="gelu"
        ),
        **bert.TOKEN_HEADS,
    },
    class_prefix="Electra",
    defaults=bert.DEFAULTS,
    wordpiece=WordPieceKind("ElectraTokenizer"),
)
