"""What the protocols share that score texts by their relevance to a query."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from cloze.service.core import ServedRequest
from cloze.service.http.body import BytesResponse
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.protocols.protocol import LenientModel, ProtocolContext, TaskRoute, json_response
from cloze.service.protocols.shared_paths import ServedName
from cloze.service.tasks import embed_all, late_interaction, rerank, similarity, text_classification
from cloze.service.tasks.texts import PromptTokens, TokenLimit

RANKED_BY: Final[Mapping[str, tuple[str, str]]] = {
    "x-ranked-by": (
        "string",
        "classifier; late-interaction where no reranker is served, else similarity (of embeddings)",
    )
}


class ScoredBody(LenientModel):
    """What bodies with texts to score have in common, in vLLM's and Infinity's protocols."""

    model: ServedName = None
    raw_scores: bool | None = None
    """Infinity's field: whether the scores are the model's logits"""
    use_activation: bool | None = None
    """vLLM's field: false is the same as raw_scores true"""
    truncate_prompt_tokens: TokenLimit = None


class RankParameters(PromptTokens, rerank.RerankParameters):
    """The parameters of the task, and vLLM's limit."""


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


def raw_scores(body: ScoredBody) -> bool | None:
    """Return what Infinity's ``raw_scores`` or vLLM's ``use_activation`` says; None: neither."""
    if body.raw_scores is None and body.use_activation is not None:
        return not body.use_activation
    return body.raw_scores
