"""BERT and DistilBERT as plain torch modules, written to be read.

`encoder` is the trunk both share, `heads` what stands on it, `model` the two together. `bert` and `distilbert` only say
how their checkpoints' configuration and tensor names map onto these modules; `FAMILIES` is the table of them.
"""

from export.models import bert, distilbert
from export.models.config import EncoderConfig, Family
from export.models.heads import Head
from export.models.model import Model

FAMILIES: dict[str, Family] = {family.name: family for family in (bert.FAMILY, distilbert.FAMILY)}
"""By the ``model_type`` of ``config.json``. A further architecture is a row here."""

__all__ = ["FAMILIES", "EncoderConfig", "Family", "Head", "Model"]
