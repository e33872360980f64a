"""The settings of ``config.json`` that give the sizes of each layer of a pruned encoder.

``pruned_heads`` is transformers' setting: the numbers of the removed heads, by layer. Only how many
there are matters, because the tensors hold the rows of the others alone; we write the last ones.
``intermediate_sizes`` is our own: transformers has no setting for the neurons of one layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cloze.export.blocks.config import EncoderConfig
from cloze.export.families.family import Family

_HEADS, _NEURONS = "pruned_heads", "intermediate_sizes"

PRUNED = frozenset({_HEADS, _NEURONS})
"""The settings of a pruned encoder."""


def read_pruned(
    family: Family, config: EncoderConfig, settings: Mapping[str, Any]
) -> EncoderConfig:
    """Return the sizes with those of each layer, if the settings have them.

    Raises:
        ValueError: the settings are malformed, or the family's layers have one size.
    """
    removed, neurons = settings.get(_HEADS) or {}, settings.get(_NEURONS)
    if not removed and neurons is None:
        return config
    if not family.is_prunable:
        raise ValueError(f"{_HEADS} and {_NEURONS} are not supported in a {family.name}")
    if neurons is not None and not isinstance(neurons, list):
        raise ValueError(f"{_NEURONS} is not a list, got {neurons!r}")
    return replace(
        config,
        layer_heads=_heads_per_layer(config, removed) if removed else None,
        layer_intermediate_sizes=None if neurons is None else tuple(neurons),
    )


def _heads_per_layer(config: EncoderConfig, removed: object) -> tuple[int, ...]:
    if not isinstance(removed, dict):
        raise ValueError(f"{_HEADS} is not an object, got {removed!r}")
    layer_heads = [config.heads] * config.layers
    for layer, numbers in removed.items():
        if layer not in map(str, range(config.layers)):
            raise ValueError(f"{_HEADS} names layer {layer!r} of {config.layers}")
        if not isinstance(numbers, list) or any(n not in range(config.heads) for n in numbers):
            raise ValueError(
                f"{_HEADS} of layer {layer} is {numbers!r}; the heads are 0 to {config.heads - 1}"
            )
        layer_heads[int(layer)] -= len(set(numbers))
        if not layer_heads[int(layer)]:
            raise ValueError(f"{_HEADS} leaves layer {layer} without a head")
    return tuple(layer_heads)


def write_pruned(config: EncoderConfig) -> dict[str, Any]:
    """Return the settings that `read_pruned` reads; nothing if all layers have one size."""
    settings: dict[str, Any] = {}
    if config.layer_heads is not None:
        settings[_HEADS] = {
            str(layer): list(range(kept, config.heads))
            for layer, kept in enumerate(config.layer_heads)
            if kept < config.heads
        }
    if config.layer_intermediate_sizes is not None:
        settings[_NEURONS] = list(config.layer_intermediate_sizes)
    return settings
