"""GTE: BERT with rotary positions and gated feed-forward networks, for long texts.

Sources: Zhang et al. 2024, "mGTE"; the code in the hub's repositories of its checkpoints, which is
never run and whose model type is ``new``; and transformers' ``GteFor*``.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import post_norm_encoder
from cloze.export.families import bert
from cloze.export.families.family import (
    Family,
    HeadSpec,
    Rule,
    Split,
    WordPieceKind,
    layer_rules,
    packed_attention,
    refuse_settings,
)
from cloze.export.families.rotary_settings import check_classes, read_rotary

_REFUSED: Final = {
    "layer_norm_type": "layer_norm",
    "position_embedding_type": "rope",
    "logn_attention_scale": False,
    "logn_attention_clip1": False,
}


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in a ``config.json`` of the hub or of transformers; see `bert.read_sizes`.

    Raises:
        KeyError: a size is missing.
        ValueError: a setting names another architecture, or a size is invalid.
    """
    check_classes(config, "New", "Gte")
    refuse_settings(config, _REFUSED)
    base, factor = read_rotary(config)
    ours = ("auto_map", "position_embedding_type")
    settings = {name: value for name, value in config.items() if name not in ours}
    return bert.read_sizes(
        "gte",
        settings,
        gated=True,
        rotary_base=base,
        rotary_factor=factor,
        without_bias=frozenset({"up"}),
    )


_OURS: Final = "encoder.layers.*"
_ATTENTION: Final = {
    "q_proj": "attention.query",
    "k_proj": "attention.key",
    "v_proj": "attention.value",
    "o_proj": "attention.output",
}
LAYER_RULES: Final = layer_rules(
    "layers.*",
    {f"self_attn.{theirs}": ours for theirs, ours in _ATTENTION.items()}
    | {
        "mlp.up_proj": "up",
        "mlp.gate_proj": "gate",
        "mlp.down_proj": "down",
        "post_attention_layernorm": "attention_norm",
        "post_mlp_layernorm": "output_norm",
    },
)
"""transformers' names of the layers, which those of NomicBERT have too."""

_RULES: Final[tuple[Rule, ...]] = (
    bert.WORDS,
    bert.TYPES,
    bert.EMBEDDING_NORM,
    *LAYER_RULES,
    *layer_rules(
        "encoder.layer.*",
        {f"attention.{theirs}": ours for theirs, ours in _ATTENTION.items()}
        | {
            "mlp.down_proj": "down",
            "attn_ln": "attention_norm",
            "mlp_ln": "output_norm",
        },
    ),
    packed_attention("encoder.layer.*.attention.qkv_proj.{p}"),
    Split(  # the second half is the gate, which is activated
        "encoder.layer.*.mlp.up_gate_proj.{p}", (f"{_OURS}.up.{{p}}", f"{_OURS}.gate.{{p}}")
    ),
)

FAMILY: Final = Family(
    name="gte",
    other_types=frozenset({"new"}),
    read_config=read_config,
    encoder=post_norm_encoder,
    prefix="gte.",
    other_prefixes=("new.",),
    rules=lambda _: _RULES,
    heads={
        "masked_lm": HeadSpec(
            {
                "lm_head.dense.{p}": "transform.{p}",
                "lm_head.layer_norm.{p}": "norm.{p}",
                "lm_head.norm.{p}": "norm.{p}",
                "lm_head.decoder.{p}": "decoder.{p}",
            },
            activation="gelu",
        ),
        "sequence_classification": HeadSpec(
            {"gte.pooler.dense.{p}": "pooler.{p}", "classifier.{p}": "classifier.{p}"}
        ),
        **bert.TOKEN_HEADS,
    },
    class_prefix="Gte",
    defaults=bert.DEFAULTS | {"max_position_embeddings": 8192, "type_vocab_size": 1},
    wordpiece=WordPieceKind("BertTokenizer"),
    sentencepiece_class="XLMRobertaTokenizer",
)
