"""Token embedding: graph and gate figure. The head has no weights of its own."""

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from cloze.export.heads.head import ExportHead, HeadGraph, mean_cosine, of_sentences, token_rows
from cloze.export.measure.scorer import Scorer
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import token_embedding
from cloze.model_store.layouts import Placement


def _write(_: Any, graph: HeadGraph) -> None:
    rows = graph.gather(token_embedding.HIDDEN_ROWS)
    graph.output(rows, token_embedding.TOKEN_EMBEDDINGS, H=graph.config.hidden_size)


def _reference(
    _: Any, states: Tensor, requests: Sequence[Any], placement: Placement
) -> dict[str, Tensor]:
    rows = states[-1]
    return {token_embedding.TOKEN_EMBEDDINGS.name: rows[token_rows(requests, placement)]}


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the mean cosine of both models' hidden states, token by token."""
    pairs = of_sentences((checkpoint, graph), token_embedding.HEAD.name, texts)
    return {"token_embedding_cosine_mean": mean_cosine(pairs)}


EXPORT_HEAD: Final = ExportHead(
    head=token_embedding.HEAD,
    module=None,
    write=_write,
    reference=_reference,
    measure=_measure,
    limits={"token_embedding_cosine_mean": 0.98},
)
