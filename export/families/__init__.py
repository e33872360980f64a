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
    modernbert,
    mpnet,
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
        modernbert,
    )
}
"""All model families by the ``model_type`` of ``config.json``."""

PRETRAINED: Final = bert.FAMILY
"""The family of models that are trained from nothing."""

__all__ = ["FAMILIES", "PRETRAINED", "Family", "HeadSpec", "WordPieceKind"]
