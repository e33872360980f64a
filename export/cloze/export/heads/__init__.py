"""The heads: torch module, graph and quality figures. Heads with one torch module share a file.

The module of a head in `cloze.model_store.heads` is the contract with the service. To add a head,
write both and add each to the registry of its package.
"""

from typing import Final

from cloze.export.heads import (
    embedding,
    entities,
    masked_lm,
    multi_vector,
    sequence_classification,
    token_classification,
)
from cloze.export.heads.head import ExportHead

EXPORT_HEADS: Final[dict[str, ExportHead]] = {
    export_head.head.name: export_head
    for export_head in (
        masked_lm.MASKED_LM,
        sequence_classification.NEXT_SENTENCE,
        token_classification.SPAN,
        sequence_classification.SEQUENCE_CLASSIFICATION,
        token_classification.TOKEN_CLASSIFICATION,
        embedding.EMBEDDING,
        embedding.TOKEN_EMBEDDING,
        masked_lm.SPARSE_EMBEDDING,
        embedding.LAYER_EMBEDDING,
        multi_vector.MULTI_VECTOR,
        multi_vector.LEXICAL,
        entities.ENTITIES,
    )
}
"""All heads by name, in the order in which graphs have them."""

MASKED_LM: Final = masked_lm.MASKED_LM.head.name
NEXT_SENTENCE: Final = sequence_classification.NEXT_SENTENCE.head.name
SPAN: Final = token_classification.SPAN.head.name
EMBEDDING: Final = embedding.EMBEDDING.head.name


__all__ = ["EMBEDDING", "EXPORT_HEADS", "MASKED_LM", "NEXT_SENTENCE", "SPAN", "ExportHead"]
