"""One module per model family: how its checkpoints are read and written, and of which blocks.

To add a family, write a module with a `FAMILY` and add it to `BUILT_IN`. No other module names one.
A family of another package is an entry point of the group `GROUP`; it is never part of a bundle or
a checkpoint.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from cloze.export.families import (
    albert,
    bert,
    camembert,
    deberta_v2,
    distilbert,
    electra,
    ernie,
    gte,
    mobilebert,
    modernbert,
    mpnet,
    nomic_bert,
    roberta,
    xlm_roberta,
)
from cloze.export.families.family import Family, HeadSpec, WordPieceKind
from cloze.model_store.error_lines import first_line

GROUP: Final = "cloze.families"
"""The group of entry points whose objects are families of other packages."""

BUILT_IN: Final[Mapping[str, Family]] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        bert,
        distilbert,
        roberta,
        xlm_roberta,
        camembert,
        ernie,
        mpnet,
        electra,
        albert,
        mobilebert,
        nomic_bert,
        gte,
        deberta_v2,
        modernbert,
    )
}
"""The model families of this package by the ``model_type`` of ``config.json``."""


def with_installed(
    built_in: Mapping[str, Family], points: Iterable[EntryPoint]
) -> tuple[dict[str, Family], tuple[str, ...]]:
    """Return the families by name with those of entry points, and a line per one left out.

    One package's fault must not keep the checkpoints of other families from an export.
    """
    families, problems = dict(built_in), []
    for point in points:
        origin = f"the family {point.name} of {point.dist.name if point.dist else point.value}"
        try:
            family = point.load()
        except Exception as error:  # a package may raise anything
            problems.append(f"{origin} is left out: it cannot be loaded: {first_line(error)}")
            continue
        if not isinstance(family, Family) or family.name != point.name:
            problems.append(f"{origin} is left out: {point.value} is not a Family of this name")
        elif family.name in families:
            problems.append(f"{origin} is left out: another family has this name")
        else:
            families[family.name] = family
    return families, tuple(problems)


_INSTALLED: Final = with_installed(BUILT_IN, entry_points(group=GROUP))

FAMILIES: Final[Mapping[str, Family]] = _INSTALLED[0]
"""All model families by name, those of other packages included."""

FAMILY_PROBLEMS: Final = _INSTALLED[1]
"""A line per family of another package that is left out."""


BY_MODEL_TYPE: Final[Mapping[object, Family]] = {
    model_type: family
    for family in FAMILIES.values()
    for model_type in (*family.other_types, family.name)
}
"""The families by every ``model_type`` that their checkpoints have."""

PRETRAINED: Final = bert.FAMILY
"""The family of models that are trained from nothing."""

__all__ = [
    "BUILT_IN",
    "BY_MODEL_TYPE",
    "FAMILIES",
    "FAMILY_PROBLEMS",
    "PRETRAINED",
    "Family",
    "HeadSpec",
    "WordPieceKind",
]
