"""Reranking: texts in the order of their relevance to a query.

A classifier of pairs with one label gives the scores; without one, late interaction, and else the
similarity of embeddings.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import Field

from cloze.model_store import Manifest
from cloze.model_store.heads import sequence_classification
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.model_store.manifest import Role
from cloze.service.core import Location
from cloze.service.tasks import late_interaction, similarity, text_classification
from cloze.service.tasks.late_interaction import Kept
from cloze.service.tasks.similarity import SimilarityInputs, SimilarityParameters
from cloze.service.tasks.task import (
    Outputs,
    PreparedRequest,
    ScoreKind,
    Task,
    TaskContext,
    Text,
    Texts,
    WireModel,
)
from cloze.service.tasks.text_classification import TextClassificationParameters, TextPair
from cloze.service.tasks.texts import LongTextRule, TruncationParameters

_CHARACTERS_PER_RESULT = 10_000
"""Characters of returned texts whose writing costs about as much as one prediction of a mask."""


class RerankInputs(WireModel):
    """A query, and the texts to rank."""

    query: Text = Field(examples=["What is deep learning?"])
    texts: Texts = Field(examples=[["A ship left the harbour.", "Networks with many layers."]])


class RerankParameters(TruncationParameters):
    """The parameters of text-embeddings-inference."""

    raw_scores: bool | None = Field(
        None,
        description="whether a classifier's scores are its logits, or their sigmoid; the default "
        "is what the checkpoint declares, or the sigmoid",
    )
    return_text: bool = Field(False, description="whether the ranks repeat the texts")


@dataclass(frozen=True, slots=True)
class Rank:
    """A text's position in the request, and its score; the text itself if it was asked for."""

    index: int
    score: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Ranking:
    """The texts, the most relevant one first, and what gave the scores."""

    ranks: list[Rank]
    by: "Scorer"


Scorer = Literal["classifier", "late-interaction", "similarity"]

_State = tuple[Scorer, Any, list[str] | None]
"""What scores, its state, and the texts if the answer repeats them."""

_QUERY: Final = Location(("query",))
_TEXTS: Final = Location(("texts",))


def classifies(manifest: Manifest) -> bool:
    """Return whether a model classifies texts with one label, whose score ranks them."""
    options = manifest.heads.get(sequence_classification.HEAD.name)
    return isinstance(options, SequenceLabels) and len(options.labels) == 1


def interacts(manifest: Manifest) -> bool:
    """Return whether a model ranks by late interaction."""
    return late_interaction.interaction(manifest) is not None


def _function(manifest: Manifest, parameters: RerankParameters) -> text_classification.Function:
    """Return the function from a classifier's logits to scores."""
    options = manifest.heads[sequence_classification.HEAD.name]
    assert isinstance(options, SequenceLabels)
    raw = options.raw_scores if parameters.raw_scores is None else parameters.raw_scores
    return "none" if raw else "sigmoid"


def _scores(manifest: Manifest, parameters: RerankParameters) -> ScoreKind:
    if classifies(manifest):
        return text_classification.score_kind(_function(manifest, parameters))
    return "maxsim" if interacts(manifest) else "cosine"


def prepare(
    inputs: RerankInputs, parameters: RerankParameters, context: TaskContext
) -> PreparedRequest[_State]:
    """Tokenize the query with the texts, which are named as in this task."""
    limits = context.limits
    limits.check_text(inputs.query, _QUERY)
    limits.check_count(len(inputs.texts), _TEXTS)
    for index, text in enumerate(inputs.texts):
        limits.check_text(text, _TEXTS.below(index))
    truncation = parameters.model_dump(include=set(TruncationParameters.model_fields))
    prepared: PreparedRequest[Any]
    scorer: Scorer
    if classifies(context.manifest):
        scorer = "classifier"
        pairs = [TextPair.model_construct(text=inputs.query, text_pair=t) for t in inputs.texts]
        function = _function(context.manifest, parameters)
        scored = TextClassificationParameters(function_to_apply=function, **truncation)
        prepared = text_classification.TASK.prepare(pairs, scored, context)
    elif interacts(context.manifest):
        scorer = "late-interaction"
        prepared = _prepare_interaction(inputs, parameters.rule(), context)
    else:
        scorer = "similarity"
        compared = SimilarityInputs.model_construct(
            source_sentence=inputs.query, sentences=inputs.texts
        )
        cosine = SimilarityParameters(**truncation)
        prepared = similarity.prepare(compared, cosine, context, in_roles=True)
    texts = inputs.texts if parameters.return_text else None
    written = sum(map(len, texts or ())) // _CHARACTERS_PER_RESULT
    return prepared._replace(
        state=(scorer, prepared.state, texts),
        results=max(prepared.results, written),
        texts=len(inputs.texts),
    )


def _prepare_interaction(
    inputs: RerankInputs, rule: LongTextRule, context: TaskContext
) -> PreparedRequest[Any]:
    """Return the encodings of a query and of the texts, as documents."""
    query, of_query = late_interaction.encode([(_QUERY, inputs.query)], Role.QUERY, rule, context)
    places = [(_TEXTS.below(index), text) for index, text in enumerate(inputs.texts)]
    documents, of_documents = late_interaction.encode(places, Role.DOCUMENT, rule, context)
    query.encodings += documents.encodings
    query.usage += documents.usage
    vectors = sum(map(len, query.encodings))
    context.limits.check_results(vectors, "the request compares", "vectors")
    return query.prepared([*of_query, *of_documents], vectors)


def _interaction_scores(kept: list[Kept], outputs: Outputs, context: TaskContext) -> list[float]:
    options = late_interaction.interaction(context.manifest)
    assert options is not None  # `prepare` saw them
    query, *documents = late_interaction.vectors(outputs, kept)
    return late_interaction.scores(query, documents, options)


def decode(state: _State, outputs: Outputs, context: TaskContext) -> Ranking:
    """Return the ranking."""
    scorer, inner, texts = state
    scores: list[float]
    if scorer == "classifier":
        labels = text_classification.TASK.decode(inner, outputs, context)
        scores = [best[0].score for best in labels]
    elif scorer == "late-interaction":
        scores = _interaction_scores(inner, outputs, context)
    else:
        scores = similarity.TASK.decode(inner, outputs, context)
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    ranks = [Rank(index, scores[index], texts[index] if texts else None) for index in order]
    return Ranking(ranks, scorer)


TASK: Final = Task(
    name="rerank",
    route="/rerank",
    summary="Texts in the order of their relevance to a query",
    heads=(),
    inputs=RerankInputs,
    parameters=RerankParameters,
    result=Ranking,
    prepare=prepare,
    decode=decode,
    scores=_scores,
)
