"""Settings that families with rotary positions share, in the forms of the hub and transformers."""

from collections.abc import Mapping
from typing import Any

from cloze.export.families.family import refuse_settings


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
