"""Reranking: texts in the order of their relevance to a query.

A classifier of pairs with one label gives the scores; without one, late interaction, and else the
similarity of embeddings. A long text is cut or, with ``long_text: "window"``, divided; then its
best window gives the score.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field

from cloze.model_store import Manifest
from cloze.model_store.heads import sequence_classification
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.model_store.manifest import Role
from cloze.service.core import InvalidRequest, Location
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
    TextUsage,
    WireModel,
)
from cloze.service.tasks.text_classification import TextClassificationParameters
from cloze.service.tasks.texts import TruncationParameters, UsageParameters
from cloze.service.tasks.windows import LongText, LongTextRule


class RerankInputs(WireModel):
    """A query, and the texts to rank."""

    query: Text = Field(examples=["What is deep learning?"])
    texts: Texts = Field(examples=[["A ship left the harbour.", "Networks with many layers."]])


class RerankParameters(TruncationParameters, UsageParameters):
    """The parameters of text-embeddings-inference, and windows."""

    long_text: LongText | None = Field(
        None,
        description="error refuses a long text, truncate cuts it, window divides it beside the "
        "whole query and returns the score of its best window; the default is truncate",
    )

    raw_scores: bool | None = Field(
        None,
        description="whether a classifier's scores are its logits, or their sigmoid; the default "
        "is what the checkpoint declares, or the sigmoid",
    )
    return_text: bool = Field(False, description="whether the ranks repeat the texts")


@dataclass(frozen=True, slots=True)
class Rank:
    """A text's position in the request, and its score.

    Attributes:
        text: the text itself, if it was asked for.
        window: (start, end) of the window with the score, in characters; None: the text has one.
    """

    index: int
    score: float
    text: str | None = None
    window: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class RankReport:
    """The answer with ``return_usage``: the ranks, and how much of each text was used."""

    result: list[Rank]
    usage: list[TextUsage]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The texts, the most relevant one first, and what gave the scores."""

    ranks: list[Rank]
    by: "Scorer"


Scorer = Literal["classifier", "late-interaction", "similarity"]

Windows = Sequence[tuple[int, int] | None]
"""The (start, end) characters of the windows of a text; None: the text was not divided."""


class _State(NamedTuple):
    """How the outputs of one request become ranks.

    Attributes:
        scorer: what scores each encoding, or each text.
        inner: the state of what scores.
        texts: the texts if the answer repeats them.
        windows: the characters of each window of each text; None: each text has one.
        function: makes scores of what the texts are ranked by, so that saturation ties none.
    """

    scorer: Scorer
    inner: Any
    texts: list[str] | None
    windows: list[Windows] | None
    function: text_classification.Function = "none"


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
    declared = text_classification.sequence_labels(manifest).raw_scores
    raw = declared if parameters.raw_scores is None else parameters.raw_scores
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
    is_divided = parameters.long_text == "window"
    report = is_divided or bool(parameters.return_usage)
    rule, scorer = parameters.rule(report=report), _scorer(context.manifest)
    function: text_classification.Function = "none"
    if scorer == "classifier":
        function = _function(context.manifest, parameters)
        prepared = _classified(inputs, rule, context)
    elif scorer == "late-interaction":
        prepared = _prepare_interaction(inputs, rule, context)
    else:
        prepared = _compared(inputs, parameters, context, report=report)
    usage = (prepared.usage or ())[-len(inputs.texts) :]  # without the query's
    texts = inputs.texts if parameters.return_text else None
    windows: list[Windows] | None = None
    if is_divided:
        windows = [text.windows or (None,) for text in usage]
    return prepared._replace(
        state=_State(scorer, prepared.state, texts, windows, function),
        texts=len(inputs.texts),
        usage=usage if parameters.return_usage else None,
    )


def _scorer(manifest: Manifest) -> Scorer:
    """Return what scores the texts of a model."""
    if classifies(manifest):
        return "classifier"
    return "late-interaction" if interacts(manifest) else "similarity"


def _classified(
    inputs: RerankInputs, rule: LongTextRule, context: TaskContext
) -> PreparedRequest[Any]:
    """Tokenize the pairs that a classifier scores."""
    scored = TextClassificationParameters(function_to_apply="none")
    pairs = [(_TEXTS.below(n), inputs.query, text) for n, text in enumerate(inputs.texts)]
    prepared: PreparedRequest[Any]
    rule = rule._replace(divides_pairs=True)
    prepared = text_classification.prepare_pairs(pairs, scored, rule, context)
    # Each window has a score of its own.
    return prepared._replace(state=prepared.state._replace(windows=None))


def _compared(
    inputs: RerankInputs, parameters: RerankParameters, context: TaskContext, *, report: bool
) -> PreparedRequest[Any]:
    """Tokenize the query and the texts whose embeddings are compared."""
    compared = SimilarityInputs.model_construct(
        source_sentence=inputs.query, sentences=inputs.texts
    )
    truncation = parameters.model_dump(include=set(TruncationParameters.model_fields))
    cosine = SimilarityParameters.model_construct(**truncation, return_usage=report)  # windows too
    prepared = similarity.prepare(compared, cosine, context, in_roles=True)
    if prepared.usage and prepared.usage[0].windows:
        tokens = prepared.usage[0].tokens
        raise InvalidRequest(f"has {tokens} tokens; long_text window divides only texts", _QUERY)
    return prepared


def _prepare_interaction(
    inputs: RerankInputs, rule: LongTextRule, context: TaskContext
) -> PreparedRequest[Any]:
    """Return the encodings of a query and of the texts, as documents."""
    if rule.choice == "window":
        problem = "is window, which late interaction does not divide texts into; leave it out"
        raise InvalidRequest(problem, Location(("long_text",)))
    query, of_query = late_interaction.encode([(_QUERY, inputs.query)], Role.QUERY, rule, context)
    places = [(_TEXTS.below(index), text) for index, text in enumerate(inputs.texts)]
    documents, of_documents = late_interaction.encode(places, Role.DOCUMENT, rule, context)
    query.encodings += documents.encodings
    query.usage += documents.usage
    vectors = sum(map(len, query.encodings))
    context.limits.check_results(vectors, "the request compares", "vectors")
    return query.prepared([*of_query, *of_documents])


def _interaction_scores(kept: list[Kept], outputs: Outputs, context: TaskContext) -> list[float]:
    options = late_interaction.interaction(context.manifest)
    assert options is not None  # `prepare` saw them
    query, *documents = late_interaction.vectors(outputs, kept)
    return late_interaction.scores(query, documents, options)


def decode(state: _State, outputs: Outputs, context: TaskContext) -> Ranking:
    """Return the ranking."""
    scores: list[float]
    if state.scorer == "classifier":
        labels = text_classification.TASK.decode(state.inner, outputs, context)
        scores = [best[0].score for best in labels]
    elif state.scorer == "late-interaction":
        scores = _interaction_scores(state.inner, outputs, context)
    else:
        scores = similarity.TASK.decode(state.inner, outputs, context)
    rest = iter(scores)
    windows = state.windows or [(None,)] * len(scores)
    # The score and the characters of each text's best window.
    best = [
        max(((next(rest), place) for place in places), key=lambda scored: scored[0])
        for places in windows
    ]
    order = sorted(range(len(best)), key=lambda index: best[index][0], reverse=True)
    values = np.array([score for score, _ in best])[:, None]
    shown = text_classification.apply(state.function, values)[:, 0].tolist()
    ranks = [
        Rank(index, shown[index], state.texts[index] if state.texts else None, best[index][1])
        for index in order
    ]
    return Ranking(ranks, state.scorer)


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
