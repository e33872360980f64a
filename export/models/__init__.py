"""BERT and DistilBERT as plain torch modules.

`encoder` is the trunk that both share; `model` adds heads, whose modules are in
`cloze.export.heads`. `bert` and `distilbert` map the configuration and the tensor names of
checkpoints to these modules.
"""

from cloze.export.models import bert, distilbert
from cloze.export.models.config import EncoderConfig, Family
from cloze.export.models.model import Model

FAMILIES: dict[str, Family] = {family.name: family for family in (bert.FAMILY, distilbert.FAMILY)}
"""All model families by the ``model_type`` of ``config.json``. To add a family, add a row."""

__all__ = ["FAMILIES", "EncoderConfig", "Family", "Model"]
