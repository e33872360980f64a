"""ModernBERT: pre-norm layers, rotary positions, gated feed-forward networks, local attention.

Source: Warner et al. 2024, "Smarter, Better, Faster, Longer", and transformers' ``ModernBertFor*``.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.config import EncoderConfig, Part
from cloze.export.blocks.encoder import Embeddings, Encoder
from cloze.export.blocks.layer import PreNormLayer, make_norm
from cloze.export.blocks.rotary import Rotary
from cloze.export.blocks.window import Window
from cloze.export.families import bert
from cloze.export.families.family import (
    Family,
    HeadSpec,
    Rename,
    Split,
    lm_head,
    packed_attention,
)
from cloze.model_store.layouts import Layout
from cloze.model_store.limits import MAX_LAYERS

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"

_FLAGS: Final[Mapping[str, tuple[Part, ...]]] = {
    "attention_bias": ("attention",),
    "mlp_bias": ("up", "down"),
    "norm_bias": ("norm",),
    "classifier_bias": ("head",),
    "decoder_bias": ("decoder",),
}
"""Settings -> the parts that they give biases."""


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in a ``config.json``; see `bert.read_sizes`.

    Newer files name the kind of each layer and the bases of its positions; older ones name every
    how many layers one is global.
    """
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        every = config.get("global_attn_every_n_layers", 3)
        counted = range(min(layers, MAX_LAYERS))  # `EncoderConfig` refuses more
        kinds = [_LOCAL if number % every else _GLOBAL for number in counted]
    if unknown := set(kinds) - {_LOCAL, _GLOBAL}:
        raise ValueError(f"layer_types {sorted(unknown)} are not supported")
    base = _base(config, _GLOBAL, "global_rope_theta")
    local_base = _base(config, _LOCAL, "local_rope_theta")
    if (activation := config.get("classifier_activation", "gelu")) in (None, ""):
        raise ValueError(f"classifier_activation must be an activation, got {activation!r}")
    window = config.get("sliding_window")  # transformers lets it replace half of local_attention
    biased = {
        part
        for flag, parts in _FLAGS.items()
        if config.get(flag, flag == "decoder_bias")
        for part in parts
    }
    ours = {
        "layer_norm_eps": config["norm_eps"],
        "hidden_act": config.get("hidden_activation", "gelu"),
        "position_embedding_type": "absolute",  # in most files, and not used
    }
    return bert.read_sizes(
        "modernbert",
        dict(config) | ours,
        type_vocab_size=0,
        gated=True,
        rotary_base=base or local_base,
        local_rotary_base=local_base or base,
        window=config.get("local_attention", 128) // 2 if window is None else window,
        local_layers=tuple(kind == _LOCAL for kind in kinds),
        without_bias=frozenset(part for parts in _FLAGS.values() for part in parts) - biased,
        head_activation=activation,
        classifier_pooling=config.get("classifier_pooling", "cls"),
    )


def _base(config: Mapping[str, Any], kind: str, older: str) -> float | None:
    """Return the base of the rotary positions of a kind of layer; None: that of the other kind."""
    if config.get("rope_scaling"):
        raise ValueError(f"rope_scaling {config['rope_scaling']} is not supported")
    parameters = config.get("rope_parameters") or {}
    given = (parameters.get(kind) or {}) if isinstance(parameters, dict) else parameters
    if not isinstance(given, dict):
        raise ValueError(f"rope_parameters must have an object for {kind}, got {parameters!r:.80}")
    if (scaling := given.get("rope_type", "default")) != "default":
        raise ValueError(f"rope_type {scaling!r} is not supported (only 'default')")
    base: float | None = given["rope_theta"] if "rope_theta" in given else config[older]
    return base


def encoder(config: EncoderConfig) -> Encoder:
    """Return the encoder of Warner et al. 2024."""
    assert config.rotary_base is not None
    assert config.local_rotary_base is not None
    assert config.window is not None
    rotary = Rotary.of(config, config.rotary_base)
    local = (Rotary.of(config, config.local_rotary_base), Window(config.window))
    layers = [
        PreNormLayer(config, *(local if is_local else (rotary, None)), is_first=number == 0)
        for number, is_local in enumerate(config.local_layers)
    ]
    return Encoder(Embeddings(config), layers, final_norm=make_norm(config))


_TRANSFORM: Final = {
    "head.dense.{p}": "transform.dense.{p}",
    "head.norm.{p}": "transform.norm.{p}",
    "classifier.{p}": "classifier.{p}",
}
_LAYER, _OURS = "layers.*", "encoder.layers.*"

FAMILY: Final = Family(
    name="modernbert",
    read_config=read_config,
    encoder=encoder,
    prefix="model.",
    rules=lambda _: (
        Rename("embeddings.tok_embeddings.weight", "encoder.embeddings.word.weight"),
        Rename("embeddings.norm.{p}", "encoder.embeddings.norm.{p}"),
        Rename("final_norm.{p}", "encoder.final_norm.{p}"),
        Rename(f"{_LAYER}.attn_norm.{{p}}", f"{_OURS}.attention_norm.{{p}}"),
        packed_attention(f"{_LAYER}.attn.Wqkv.{{p}}"),
        Rename(f"{_LAYER}.attn.Wo.{{p}}", f"{_OURS}.attention.output.{{p}}"),
        Rename(f"{_LAYER}.mlp_norm.{{p}}", f"{_OURS}.output_norm.{{p}}"),
        Split(f"{_LAYER}.mlp.Wi.{{p}}", (f"{_OURS}.gate.{{p}}", f"{_OURS}.up.{{p}}")),
        Rename(f"{_LAYER}.mlp.Wo.{{p}}", f"{_OURS}.down.{{p}}"),
    ),
    heads={
        "masked_lm": lm_head("head.dense", "head.norm", "decoder", needs_class=True),
        "sequence_classification": HeadSpec(
            {
                "head.dense.{p}": "pooler.{p}",
                "head.norm.{p}": "norm.{p}",
                "classifier.{p}": "classifier.{p}",
            }
        ),
        "span": HeadSpec(_TRANSFORM, needs_class=True),
        "token_classification": HeadSpec(_TRANSFORM),
    },
    class_prefix="ModernBert",
    defaults={"max_position_embeddings": 8192, "norm_eps": 1e-5},
    layouts=frozenset({Layout.DENSE}),
    dense_because="its local attention has windows, which the variable-length kernel has not",
)
