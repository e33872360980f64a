"""MPNet: RoBERTa without token types, with a bias of attention by distance.

Source: Song et al. 2020, and transformers' ``MPNetFor*``.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import Embeddings, Encoder
from cloze.export.blocks.layer import Layer
from cloze.export.blocks.relative_bias import BUCKETS, RelativeBias
from cloze.export.families import bert
from cloze.export.families.family import Family, Rename, WordPieceKind, layer_rules, refuse_settings
from cloze.export.families.roberta import FIRST_POSITION, POSITIONS_FROM_2, ROBERTA_HEADS
from cloze.model_store.layouts import Layout


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in a ``config.json``; see `bert.read_sizes`.

    The rows of positions begin at 2 whatever the padding's id is.
    """
    refuse_settings(config, {"relative_attention_num_buckets": BUCKETS})
    positions = config["max_position_embeddings"] - FIRST_POSITION
    return bert.read_sizes("mpnet", config, max_positions=positions, type_vocab_size=0)


def encoder(config: EncoderConfig) -> Encoder:
    """Return the encoder of Song et al. 2020."""
    layers = [Layer(config) for _ in range(config.layers)]
    return Encoder(Embeddings(config), layers, RelativeBias(config.heads, config.max_positions))


FAMILY: Final = Family(
    name="mpnet",
    read_config=read_config,
    encoder=encoder,
    prefix="mpnet.",
    rules=lambda _: (
        bert.WORDS,
        POSITIONS_FROM_2,
        bert.EMBEDDING_NORM,
        Rename("encoder.relative_attention_bias.weight", "encoder.relative_bias.buckets.weight"),
        *layer_rules(
            "encoder.layer.*",
            {
                "attention.attn.q": "attention.query",
                "attention.attn.k": "attention.key",
                "attention.attn.v": "attention.value",
                "attention.attn.o": "attention.output",
                "attention.LayerNorm": "attention_norm",
                "intermediate.dense": "up",
                "output.dense": "down",
                "output.LayerNorm": "output_norm",
            },
        ),
    ),
    heads=ROBERTA_HEADS,
    class_prefix="MPNet",
    wrong_defaults=frozenset(bert.DEFAULTS),
    wordpiece=WordPieceKind(
        "MPNetTokenizer",
        {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"},
        separators=2,
    ),
    layouts=frozenset({Layout.DENSE}),
)
