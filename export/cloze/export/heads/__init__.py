"""One module per head: its torch module, graph and quality figures.

The module of the same name in `cloze.model_store.heads` is the contract with the service. To add a
head, write both modules and add each to the registry of its package.
"""

from typing import Final

from cloze.export.heads import (
    embedding,
    layer_embedding,
    lexical,
    masked_lm,
    multi_vector,
    next_sentence,
    sequence_classification,
    span,
    sparse_embedding,
    token_classification,
    token_embedding,
)
from cloze.export.heads.head import ExportHead

_MODULES = (
    masked_lm,
    next_sentence,
    span,
    sequence_classification,
    token_classification,
    embedding,
    token_embedding,
    sparse_embedding,
    layer_embedding,
    multi_vector,
    lexical,
)

EXPORT_HEADS: Final[dict[str, ExportHead]] = {
    module.EXPORT_HEAD.head.name: module.EXPORT_HEAD for module in _MODULES
}
"""All heads by name, in the order in which graphs have them."""

MASKED_LM: Final = masked_lm.EXPORT_HEAD.head.name
NEXT_SENTENCE: Final = next_sentence.EXPORT_HEAD.head.name
SPAN: Final = span.EXPORT_HEAD.head.name
EMBEDDING: Final = embedding.EXPORT_HEAD.head.name


__all__ = [
    "EMBEDDING",
    "EXPORT_HEADS",
    "MASKED_LM",
    "NEXT_SENTENCE",
    "SPAN",
    "ExportHead",
]
