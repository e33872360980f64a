"""NomicBERT: BERT with rotary positions, gated feed-forward networks and no biases.

Sources: Nussbaum et al. 2024, "Nomic Embed"; the code in the hub's repositories of its checkpoints,
which is never run; and transformers' ``NomicBertFor*``. The settings of the hub have GPT-2's names,
those of transformers BERT's. Tensors have the hub's names in the files of both.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import post_norm_encoder
from cloze.export.families import bert, gte
from cloze.export.families.family import (
    Family,
    Rename,
    Rule,
    WordPieceKind,
    classifier,
    layer_rules,
    lm_head,
    packed_attention,
    refuse_settings,
)

TRAINED_POSITIONS: Final = 2048
"""The longest texts of the training. Longer ones would need another base for each length."""

_INNER_MULTIPLE: Final = 256
"""The hub's code rounds the inner size of the feed-forward network up to a multiple of this."""

_HUB_NAMES: Final = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
"""transformers' names of settings -> the hub's."""

_GATES: Final = {"swiglu": "silu", "geglu": "gelu"}
"""The hub's names of gated feed-forward networks -> the activations of their gates."""

_BIASES: Final = {
    "qkv_proj_bias": "attention",
    "mlp_fc1_bias": "up",
    "mlp_fc2_bias": "down",
}
"""Settings that give biases to a part of each layer. The published models have none of them."""

_REFUSED: Final = {
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "causal": False,
    "norm_mlp": False,
    "num_experts": 0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
}


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in a ``config.json`` of the hub or of transformers; see `bert.read_sizes`.

    Raises:
        KeyError: a size is missing.
        ValueError: a setting names another architecture, or both names of a setting are given and
            differ.
    """
    gte.check_classes(config, "NomicBert")
    refuse_settings(config, _REFUSED)
    settings = {name: value for name, value in config.items() if name != "auto_map"}
    for name, theirs in _HUB_NAMES.items():
        if theirs not in settings:
            continue
        if settings.setdefault(name, settings[theirs]) != settings[theirs]:
            # The hub's limit is that of its scaling, transformers' that of the training.
            if name == "max_position_embeddings":
                continue
            raise ValueError(f"{theirs} {settings[theirs]!r} and {name} {settings[name]!r} differ")
    if "activation_function" in settings:
        function = settings["activation_function"]
        if function not in _GATES:
            raise ValueError(
                f"activation_function {function!r} is not supported (only {', '.join(_GATES)})"
            )
        settings["hidden_act"] = _GATES[function]
    if "intermediate_size" not in settings:
        inner = settings.get("n_inner") or 4 * settings["hidden_size"]
        settings["intermediate_size"] = -(-inner // _INNER_MULTIPLE) * _INNER_MULTIPLE
    base, _ = gte.read_rotary(settings, settings.get("rotary_emb_base"))
    trained = settings.get("max_trained_positions") or TRAINED_POSITIONS
    return bert.read_sizes(
        "nomic_bert",
        {"hidden_act": "silu"} | settings,
        max_positions=min(settings["max_position_embeddings"], trained),
        gated=True,
        rotary_base=base,
        without_bias=frozenset(
            part for setting, part in _BIASES.items() if not settings.get(setting)
        ),
    )


_RULES: Final[tuple[Rule, ...]] = (
    bert.WORDS,
    bert.TYPES,
    bert.EMBEDDING_NORM,
    Rename("emb_ln.{p}", "encoder.embeddings.norm.{p}"),
    *gte.LAYER_RULES,
    packed_attention("encoder.layers.*.attn.Wqkv.{p}"),
    *layer_rules(
        "encoder.layers.*",
        {
            "attn.out_proj": "attention.output",
            "mlp.fc11": "up",
            "mlp.fc12": "gate",  # the second of the two is the one that is activated
            "mlp.fc2": "down",
            "norm1": "attention_norm",
            "norm2": "output_norm",
        },
    ),
)

FAMILY: Final = Family(
    name="nomic_bert",
    read_config=read_config,
    encoder=post_norm_encoder,
    prefix="nomic_bert.",
    other_prefixes=("bert.",),
    rules=lambda _: _RULES,
    heads={
        "masked_lm": lm_head(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.layer_norm",
            "cls.predictions.decoder",
            "cls.predictions.bias",
            zeros=frozenset({"transform.bias", "decoder.bias"}),
        ),
        "sequence_classification": classifier("nomic_bert.pooler.dense"),
        **bert.TOKEN_HEADS,
    },
    class_prefix="NomicBert",
    defaults=bert.DEFAULTS | {"max_position_embeddings": TRAINED_POSITIONS},
    wordpiece=WordPieceKind("BertTokenizer"),
)
