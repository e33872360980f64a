"""One module per head: its tensors, its requests and results, and their conversion.

To add a head, write a module with a `HEAD` and add it to `HEADS`.
"""

from collections.abc import Collection
from typing import Final

from cloze.model_store.heads import (
    embedding,
    entities,
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
from cloze.model_store.heads.head import ArrayResult, GraphSpec, Head, HeadRequest, Pooling

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
    entities,
)

HEADS: Final[dict[str, Head]] = {module.HEAD.name: module.HEAD for module in _MODULES}
"""All heads by name, in the order in which graphs have them."""

_BY_TASK: Final = {head.task: head for head in HEADS.values()}


def heads_of_tasks(tasks: Collection[str]) -> tuple[Head, ...]:
    """Return the heads of the tasks that a manifest or `cloze export --task` names, in graph order.

    Raises:
        ValueError: no head has one of these names.
    """
    if unknown := [task for task in tasks if task not in _BY_TASK]:
        raise ValueError(f"no head serves {unknown[0]!r} (known: {', '.join(_BY_TASK)})")
    return tuple(head for head in HEADS.values() if head.task in tasks)


__all__ = ["HEADS", "ArrayResult", "GraphSpec", "Head", "HeadRequest", "Pooling", "heads_of_tasks"]
