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
    classifier,
    layer_rules,
    packed_attention,
    refuse_settings,
)

_REFUSED: Final = {
    "layer_norm_type": "layer_norm",
    "position_embedding_type": "rope",
    "logn_attention_scale": False,
    "logn_attention_clip1": False,
}


def check_classes(config: Mapping[str, Any], *prefixes: str) -> None:
    """Check that a checkpoint's classes are those of a family that needs no code to be run.

    The hub's repositories of some families name code of their own (``auto_map``). Their checkpoints
    are recognised by the names of their classes.

    Raises:
        ValueError: a class has another name, or code is named and no class.
    """
    classes = [str(name) for name in config.get("architectures") or []]
    others = [name for name in classes if not name.startswith(prefixes)]
    if others:
        raise ValueError(f"the class {others[0]} is not supported (only {', '.join(prefixes)}...)")
    if config.get("auto_map") and not classes:
        raise ValueError(
            "the checkpoint is computed by code of its own (auto_map), which is never run, and "
            "architectures does not name its class"
        )


def read_rotary(config: Mapping[str, Any], base: float | None = None) -> tuple[float, float]:
    """Return the base and the factor of rotary positions; see `cloze.export.blocks.rotary.Rotary`.

    Args:
        base: the base if the settings have it under another name.

    Raises:
        KeyError: the base is missing. Its defaults differ between programs.
        ValueError: the frequencies are scaled in a way that is not supported, or two bases differ.
    """
    older, newer = (config.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
    for name, rope in (("rope_scaling", older), ("rope_parameters", newer)):
        if not isinstance(rope, dict):
            raise ValueError(f"{name} must be an object, got {rope!r:.80}")
    if older and newer and older != newer:
        raise ValueError(f"rope_scaling {older!r:.80} and rope_parameters {newer!r:.80} differ")
    rope = older or newer
    named = (base, rope.get("rope_theta"), config.get("rope_theta"))
    given = [one for one in named if one is not None]
    factor = rope.get("factor") or 1.0
    for number in (*given, factor):
        if type(number) not in (int, float):
            raise ValueError(f"rope_theta and factor must be numbers, got {number!r:.80}")
    if not given:
        raise KeyError("rope_theta")
    if len(bases := sorted({float(one) for one in given})) > 1:
        raise ValueError(f"rotary bases {bases} differ (rope_theta)")
    [theta] = bases
    kind = rope.get("rope_type") or rope.get("type") or "default"
    refuse_settings(rope, {"partial_rotary_factor": 1.0, "mixed_b": None})
    if kind == "default":
        return theta, 1.0
    if kind == "ntk":
        return theta, factor
    if kind == "linear":  # all frequencies divided by one number
        head_size = config["hidden_size"] // config["num_attention_heads"]
        scaled = round(factor ** (head_size / 2), 6)
        return round(theta / scaled, 6), scaled
    raise ValueError(f"rope_type {kind!r} is not supported (only ntk)")


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
        "sequence_classification": classifier("gte.pooler.dense"),
        **bert.TOKEN_HEADS,
    },
    class_prefix="Gte",
    defaults=bert.DEFAULTS | {"max_position_embeddings": 8192, "type_vocab_size": 1},
    wordpiece=WordPieceKind("BertTokenizer"),
    sentencepiece_class="XLMRobertaTokenizer",
)
