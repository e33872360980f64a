"""The model families: how the checkpoints of each are read, and of which blocks.

To add a family, write a module with a `FAMILY` and add it to `BUILT_IN`. No other module names one.
A family of another package is an entry point of the group `GROUP`; it is never part of a bundle or
a checkpoint.
"""

from collections import UserDict
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from cloze.export.families import (
    albert,
    bert,
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
)
from cloze.export.families.family import Family, HeadSpec, WordPieceKind
from cloze.model_store.error_lines import first_line

GROUP: Final = "cloze.families"
"""The group of entry points whose objects are families of other packages."""

BUILT_IN: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        bert.FAMILY,
        distilbert.FAMILY,
        roberta.FAMILY,
        roberta.XLM_ROBERTA,
        roberta.CAMEMBERT,
        ernie.FAMILY,
        mpnet.FAMILY,
        electra.FAMILY,
        albert.FAMILY,
        mobilebert.FAMILY,
        nomic_bert.FAMILY,
        gte.FAMILY,
        deberta_v2.FAMILY,
        modernbert.FAMILY,
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


class Families(UserDict[str, Family]):
    """All model families by name, those of other packages included.

    The families of other packages are loaded at the first use, not when this module is imported: a
    package that is imported first imports this module before its own family exists.
    """

    def __init__(self) -> None:
        """Load nothing."""

    @cached_property
    def _installed(self) -> tuple[dict[str, Family], tuple[str, ...]]:
        return with_installed(BUILT_IN, entry_points(group=GROUP))

    @cached_property
    def data(self) -> dict[str, Family]:  # type: ignore[override]
        """The families, as `UserDict` reads them."""
        return self._installed[0]

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """A line per family of another package that is left out."""
        return self._installed[1]

    @cached_property
    def by_model_type(self) -> Mapping[object, Family]:
        """The families by every ``model_type`` that their checkpoints have."""
        return {
            model_type: family
            for family in self.values()
            for model_type in (*family.other_types, family.name)
        }


FAMILIES: Final = Families()

__all__ = ["BUILT_IN", "FAMILIES", "Family", "HeadSpec", "WordPieceKind"]
