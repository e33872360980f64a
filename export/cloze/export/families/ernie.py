"""ERNIE: BERT with embeddings of task types, of which an encoder uses the first one.

Source: Sun et al. 2020, and transformers' ``ErnieFor*``.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import post_norm_encoder
from cloze.export.families import bert
from cloze.export.families.family import Family, Fold, WordPieceKind

_TYPES_AND_TASK: Final = Fold("embeddings.task_type_embeddings.weight", bert.TYPES.ours, bert.TYPES)


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the sizes in a ``config.json``; see `bert.read_sizes`."""
    return bert.read_sizes("ernie", config, task_types=bool(config.get("use_task_id")))


FAMILY: Final = Family(
    name="ernie",
    read_config=read_config,
    encoder=post_norm_encoder,
    prefix="ernie.",
    rules=lambda config: (
        bert.WORDS,
        bert.POSITIONS,
        _TYPES_AND_TASK if config.task_types else bert.TYPES,
        bert.EMBEDDING_NORM,
        *bert.LAYER_RULES,
    ),
    heads=bert.heads("ernie."),
    class_prefix="Ernie",
    defaults=bert.DEFAULTS,
    wordpiece=WordPieceKind("BertTokenizer"),
)
