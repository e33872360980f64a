"""DeBERTa-v2 and v3, mDeBERTa included: attention to contents and positions apart.

Sources: He et al. 2021a, He et al. 2021b, and transformers' ``DebertaV2For*``.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.config import Convolution, EncoderConfig, RelativePositions
from cloze.export.blocks.disentangled import ConvolvedLayer, DisentangledLayer, PositionTable
from cloze.export.blocks.encoder import Embeddings, Encoder
from cloze.export.families import bert
from cloze.export.families.family import (
    Family,
    HeadSpec,
    Rename,
    Rule,
    classifier,
    layer_rules,
    refuse_settings,
)
from cloze.model_store.layouts import Layout

_NEW_LM_HEAD: Final = (
    Rename("lm_predictions.lm_head.dense.{p}", "masked_lm.transform.{p}"),
    Rename("lm_predictions.lm_head.LayerNorm.{p}", "masked_lm.norm.{p}"),
    Rename("lm_predictions.lm_head.bias", "masked_lm.decoder.bias"),
)
"""The head of masked language modelling of a checkpoint whose settings say ``legacy`` false.

Without that setting, transformers predicts with the tensors of the other names, or with random ones
if the checkpoint lacks them.
"""


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in a ``config.json``; see `bert.read_sizes`.

    The defaults are those of transformers, which no published checkpoint has all of.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    only = {"attention_head_size": hidden // heads, "pooler_hidden_act": "gelu"}
    refuse_settings(config, only)
    width = config.get("embedding_size") or hidden
    return bert.read_sizes(
        "deberta-v2",
        config,
        embedding_size=width if width != hidden else None,
        position_embeddings=bool(config.get("position_biased_input", True)),
        relative_positions=_relative_positions(config),
        convolution=_convolution(config),
        legacy_lm_head=bool(config.get("legacy", True)),
    )


def _relative_positions(config: Mapping[str, Any]) -> RelativePositions:
    if not config.get("relative_attention", False):
        raise ValueError("a DeBERTa without relative_attention is not supported")
    terms = config.get("pos_att_type") or ()
    terms = terms.lower().split("|") if isinstance(terms, str) else terms
    norm = config.get("norm_rel_ebd", "none")
    if not isinstance(norm, str):
        raise ValueError(f"norm_rel_ebd must be a word, got {norm!r:.80}")
    distances = config.get("max_relative_positions", -1)
    return RelativePositions(
        distances=distances if distances > 0 else config["max_position_embeddings"],
        buckets=max(config.get("position_buckets", -1), 0),
        terms=tuple(sorted({term.strip() for term in terms})),
        share_projections=bool(config.get("share_att_key", False)),
        norm="layer_norm" in [name.strip() for name in norm.lower().split("|")],
    )


def _convolution(config: Mapping[str, Any]) -> Convolution | None:
    if (kernel := config.get("conv_kernel_size", 0)) <= 0:
        return None
    return Convolution(
        kernel=kernel,
        groups=config.get("conv_groups", 1),
        activation=config.get("conv_act", "tanh"),
    )


def encoder(config: EncoderConfig) -> Encoder:
    """Return the encoder of He et al. 2021b; that of the first paper has a convolution too."""
    table = PositionTable(config)
    layers = [
        (ConvolvedLayer if number == 0 and config.convolution else DisentangledLayer)(config, table)
        for number in range(config.layers)
    ]
    return Encoder(Embeddings(config, norm_is_last=True), layers, table)


def _rules(config: EncoderConfig) -> tuple[Rule, ...]:
    return (
        *(() if config.legacy_lm_head else _NEW_LM_HEAD),
        *bert.EMBEDDING_RULES,
        Rename("embeddings.embed_proj.weight", "encoder.embeddings.projection.weight"),
        Rename("encoder.rel_embeddings.weight", "encoder.relative_bias.rows.weight"),
        Rename("encoder.LayerNorm.{p}", "encoder.relative_bias.norm.{p}"),
        Rename("encoder.conv.conv.{p}", "encoder.layers.0.convolution.{p}"),
        Rename("encoder.conv.LayerNorm.{p}", "encoder.layers.0.convolution_norm.{p}"),
        *layer_rules(
            "encoder.layer.*",
            {
                "attention.self.query_proj": "attention.query",
                "attention.self.key_proj": "attention.key",
                "attention.self.value_proj": "attention.value",
                "attention.self.pos_key_proj": "attention.position_key",
                "attention.self.pos_query_proj": "attention.position_query",
                "attention.output.dense": "attention.output",
                "attention.output.LayerNorm": "attention_norm",
                "intermediate.dense": "up",
                "output.dense": "down",
                "output.LayerNorm": "output_norm",
            },
        ),
    )


FAMILY: Final = Family(
    name="deberta-v2",
    read_config=read_config,
    encoder=encoder,
    prefix="deberta.",
    rules=_rules,
    heads={
        "masked_lm": HeadSpec(
            bert.MASKED_LM,
            without={
                "lm_predictions": "config.json does not declare the checkpoint's lm_predictions "
                "(legacy is not false), so transformers would predict with random weights",
                "mask_predictions": "the checkpoint is a discriminator, which only says which "
                "words were replaced",
            },
        ),
        "sequence_classification": classifier("pooler.dense", activation="gelu"),
        **bert.TOKEN_HEADS,
    },
    class_prefix="DebertaV2",
    defaults=bert.DEFAULTS | {"type_vocab_size": 0, "layer_norm_eps": 1e-7},
    sentencepiece_class="DebertaV2Tokenizer",
    layouts=frozenset({Layout.DENSE}),
)
