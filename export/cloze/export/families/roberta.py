"""RoBERTa: BERT with an offset of positions and without token types.

Source: Liu et al. 2019, and transformers' ``RobertaFor*``, ``XLMRobertaFor*`` and
``CamembertFor*``. XLM-RoBERTa and CamemBERT differ in their names and tokenizers only.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from cloze.export.blocks.config import USUAL_PADDING_ID, EncoderConfig
from cloze.export.blocks.encoder import post_norm_encoder
from cloze.export.families import bert
from cloze.export.families.family import Family, Fold, Slice, classifier, lm_head

FIRST_POSITION: Final = USUAL_PADDING_ID + 1
"""The usual row of the first token's position. The rows up to the padding's id are unused."""

POSITIONS_FROM_2: Final = Slice(
    "embeddings.position_embeddings.weight", "encoder.embeddings.position.weight", FIRST_POSITION
)

ROBERTA_HEADS: Final = {
    "masked_lm": lm_head(
        "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", activation="gelu"
    ),
    "sequence_classification": classifier("classifier.dense", "classifier.out_proj"),
    **bert.TOKEN_HEADS,
}


def read_config(family: str, config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in a ``config.json``; see `bert.read_sizes`."""
    padding_id = config.get("pad_token_id", USUAL_PADDING_ID)
    positions = config["max_position_embeddings"] - (padding_id + 1)
    return bert.read_sizes(
        family, config, max_positions=positions, type_vocab_size=0, padding_id=padding_id
    )


def roberta_family(
    name: str,
    class_prefix: str,
    sentencepiece_class: str | None = None,
    *,
    byte_level_class: str | None = None,
) -> Family:
    """Return a family that computes what RoBERTa does; see the attributes of `Family`."""
    return Family(
        name=name,
        read_config=partial(read_config, name),
        encoder=post_norm_encoder,
        prefix="roberta.",
        rules=lambda config: (
            bert.WORDS,
            Fold(
                "embeddings.token_type_embeddings.weight",
                POSITIONS_FROM_2.ours,
                replace(POSITIONS_FROM_2, first=config.padding_id + 1),
            ),
            bert.EMBEDDING_NORM,
            *bert.LAYER_RULES,
        ),
        heads=ROBERTA_HEADS,
        class_prefix=class_prefix,
        sentencepiece_class=sentencepiece_class,
        byte_level_class=byte_level_class,
        wrong_defaults=frozenset({*bert.DEFAULTS, "vocab_size"}),
    )


FAMILY: Final = roberta_family("roberta", "Roberta", byte_level_class="RobertaTokenizer")

XLM_ROBERTA: Final = roberta_family("xlm-roberta", "XLMRoberta", "XLMRobertaTokenizer")
"""On a hundred languages, with a Unigram tokenizer (Conneau et al. 2020)."""

CAMEMBERT: Final = roberta_family("camembert", "Camembert", "CamembertTokenizer")
"""On French, with a Unigram tokenizer (Martin et al. 2020)."""
