"""What the protocols share that score texts by their relevance to a query."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from cloze.service.core import ServedRequest
from cloze.service.http.body import BytesResponse
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.protocols.protocol import ProtocolContext, TaskRoute, json_response
from cloze.service.tasks import (
    embed_all,
    late_interaction,
    rerank,
    similarity,
    text_classification,
)

RANKED_BY: Final[Mapping[str, tuple[str, str]]] = {
    "x-ranked-by": (
        "string",
        "classifier; late-interaction where no reranker is served, else similarity (of embeddings)",
    )
}


class RankRoute(TaskRoute):
    """A route that scores texts by their relevance to a query."""

    task = rerank.TASK

    def _serving(self, models: Models) -> Sequence[Pipeline]:
        """Return rerankers, models of late interaction, and those that embed."""
        classifying = models.serving(text_classification.TASK)
        ranking = [p for p in classifying if rerank.scorer_of(p.manifest) == "classifier"]
        interacting = models.serving(embed_all.TASK)
        ranking += [p for p in interacting if late_interaction.interaction(p.manifest) is not None]
        ranking += models.serving(similarity.TASK)
        return list(dict.fromkeys(ranking))

    @staticmethod
    def answer(request: ServedRequest, value: Any, scorer: rerank.Scorer) -> BytesResponse:
        """Return the response with a value, and what gave the scores."""
        response = json_response(value, in_parts=request.is_large)
        response.raw_headers.append((b"x-ranked-by", scorer.encode()))
        return response


def can_rank(context: ProtocolContext) -> bool:
    """Return whether the server offers the tasks that ranking needs."""
    return {similarity.TASK.name, text_classification.TASK.name} <= context.tasks.keys()


def raw_scores(body: Any) -> bool | None:
    """Return what Infinity's ``raw_scores`` or vLLM's ``use_activation`` says; None: neither."""
    if body.raw_scores is None and body.use_activation is not None:
        return not body.use_activation
    said: bool | None = body.raw_scores
    return said
