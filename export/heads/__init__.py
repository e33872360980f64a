"""One module per head: its torch module, graph, tensor names and quality figures.

The module of the same name in `cloze.model_store.heads` is the contract with the service. To add a
head, write both modules and add each to the registry of its package.
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.export.heads import (
    embedding,
    layer_embedding,
    masked_lm,
    next_sentence,
    sequence_classification,
    span,
    sparse_embedding,
    token_classification,
    token_embedding,
)
from cloze.export.heads.head import ExportHead
from cloze.export.models.config import Family
from cloze.export.models.model import Model
from cloze.export.sentence import EmbeddingRecipe

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
)

EXPORT_HEADS: Final[dict[str, ExportHead]] = {
    module.EXPORT_HEAD.head.name: module.EXPORT_HEAD for module in _MODULES
}
"""All heads by name, in the order in which graphs have them."""

MASKED_LM: Final = masked_lm.EXPORT_HEAD.head.name
NEXT_SENTENCE: Final = next_sentence.EXPORT_HEAD.head.name
SPAN: Final = span.EXPORT_HEAD.head.name
EMBEDDING: Final = embedding.EXPORT_HEAD.head.name


def tensor_names(family: Family) -> dict[str, Mapping[str, str]]:
    """Return the names of each head's tensors in a family's checkpoints; see `Family.heads`."""
    names = {
        name: family.heads.get(name) or head.tensor_names.get(family.name)
        for name, head in EXPORT_HEADS.items()
    }
    return {name: tensors for name, tensors in names.items() if tensors}


def head_module(model: Model, recipe: EmbeddingRecipe, name: str) -> Any:
    """Return the module that a head's functions take; None if the model lacks the head.

    The functions of a head without a torch module take the recipe of embeddings.
    """
    head = EXPORT_HEADS[name]
    if head.module is None and head.module_of is None:
        return recipe
    return getattr(model, head.module_of or name)


__all__ = [
    "EMBEDDING",
    "EXPORT_HEADS",
    "MASKED_LM",
    "NEXT_SENTENCE",
    "SPAN",
    "ExportHead",
    "head_module",
    "tensor_names",
]
