"""One module per model family: how its checkpoints are read and written, and of which blocks.

To add a family, write a module with a `FAMILY` and add it to `FAMILIES`. No other module names one.
"""

from collections.abc import Mapping
from typing import Final

from cloze.export.families import (
    albert,
    bert,
    camembert,
    distilbert,
    electra,
    ernie,
    gte,
    mobilebert,
    mpnet,
    nomic_bert,
    roberta,
    xlm_roberta,
)
from cloze.export.families.family import Family, HeadSpec, WordPieceKind

FAMILIES: Final[Mapping[str, Family]] = {
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
    )
}
"""All model families by the ``model_type`` of ``config.json``."""


def family_of(model_type: object) -> Family | None:
    """Return the family whose checkpoints have a ``model_type``; None: no family has it."""
    for name, family in FAMILIES.items():
        if model_type == name or model_type in family.other_types:
            return family
    return None


PRETRAINED: Final = bert.FAMILY
"""The family of models that are trained from nothing."""

__all__ = ["FAMILIES", "PRETRAINED", "Family", "HeadSpec", "WordPieceKind", "family_of"]
