"""BERT and DistilBERT as plain torch modules.

`encoder` is the trunk that both share; `model` adds heads, whose modules are in `export.heads`.
`bert` and `distilbert` map the configuration and the tensor names of checkpoints to these modules.
"""

from export.models import bert, distilbert
from export.models.config import EncoderConfig, Family
from export.models.model import Model

FAMILIES: dict[str, Family] = {family.name: family for family in (bert.FAMILY, distilbert.FAMILY)}
"""All model families by the ``model_type`` of ``config.json``. To add a family, add a row."""

__all__ = ["FAMILIES", "EncoderConfig", "Family", "Model"]
