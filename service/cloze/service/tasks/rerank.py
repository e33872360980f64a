"""Reranking: texts in the order of their relevance to a query.

A classifier of pairs with one label gives the scores; without one, late interaction, and else the
similarity of embeddings. A long text is cut or, with ``long_text: "window"``, divided; then its
best window gives the score.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from pydantic import Field

from cloze.model_store import Manifest
from cloze.model_store.heads import sequence_classification
from cloze.model_store.manifest import Role
from cloze.service.errors import InvalidRequest, Location, TextTooLong
from cloze.service.tasks import late_interaction, similarity, text_classification
from cloze.service.tasks.late_interaction import Kept
from cloze.service.tasks.similarity import VECTORS
from cloze.service.tasks.task import (
    Input,
    Outputs,
    PreparedRequest,
    ScoreKind,
    Task,
    TaskContext,
    TextUsage,
)
from cloze.service.tasks.texts import (
    LongTextRule,
    TextEncoder,
    TruncationParameters,
    UsageParameters,
    encode_pairs,
    encode_texts,
)
from cloze.service.tasks.wire import Text, Texts, WireModel


class RerankInputs(WireModel):
    """A query, and the texts to rank."""

    query: Text = Field(examples=["What is deep learning?"])
    texts: Texts = Field(examples=[["A ship left the harbour.", "Networks with many layers."]])


class RerankParameters(TruncationParameters, UsageParameters):
    """The parameters of text-embeddings-inference, and windows."""

    raw_scores: bool | None = Field(
        None, description="whether a classifier's scores are its logits, and not their sigmoid"
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


class _State(NamedTuple):
    """How the outputs of one request become ranks.

    The function makes scores of what the texts are ranked by, so that saturation ties none.
    """

    scorer: Scorer
    kept: list[Kept]
    texts: list[str] | None
    windows: Sequence[Sequence[tuple[int, int] | None]]
    function: text_classification.Function


_QUERY: Final = Location(("query",))


def scorer_of(manifest: Manifest) -> Scorer:
    """Return what scores the texts of a model: a classifier needs one label alone."""
    options = manifest.heads.get(sequence_classification.HEAD.name)
    if isinstance(options, sequence_classification.SequenceLabels) and len(options.labels) == 1:
        return "classifier"
    return "similarity" if late_interaction.interaction(manifest) is None else "late-interaction"


def _function(manifest: Manifest, parameters: RerankParameters) -> text_classification.Function:
    """Return the function from what the texts are ranked by to scores."""
    if scorer_of(manifest) != "classifier":
        return "none"
    declared = text_classification.sequence_labels(manifest).raw_scores
    raw = declared if parameters.raw_scores is None else parameters.raw_scores
    return "none" if raw else "sigmoid"


def _scores(manifest: Manifest, parameters: RerankParameters) -> ScoreKind:
    scorer = scorer_of(manifest)
    if scorer == "classifier":
        return text_classification.score_kind(_function(manifest, parameters))
    return "maxsim" if scorer == "late-interaction" else "cosine"


def prepare(
    inputs: RerankInputs, parameters: RerankParameters, context: TaskContext
) -> PreparedRequest[_State]:
    """Tokenize the query with the texts, which are named as in this task."""
    scorer = scorer_of(context.manifest)
    query = context.limits.checked(inputs.query, _QUERY)
    texts = context.limits.checked(
        inputs.texts, Location(("texts",)), others=scorer == "similarity"
    )
    report = parameters.return_usage or parameters.long_text == "window"
    rule = parameters.rule(report=report)._replace(divides_pairs=True)
    kept: list[Kept] = []
    if scorer == "classifier":
        pairs = [(at, inputs.query, text) for at, text in texts]
        encoder = encode_pairs(pairs, rule, context, text_classification.REQUEST)
    elif scorer == "late-interaction":
        encoder, kept = _encode_roles(query, texts, rule, context)
    else:
        prompts = [context.prompt_of(Role.QUERY), *[context.prompt_of(Role.DOCUMENT)] * len(texts)]
        encoder = encode_texts([*query, *texts], rule, context, VECTORS, prompts=prompts)
        if (usage := encoder.texts[0].usage).windows:
            problem = f"has {usage.tokens} tokens; long_text window divides only texts"
            raise TextTooLong(problem, _QUERY)
    usages = [text.usage for text in encoder.texts[-len(texts) :]]  # without the query's
    windows = [usage.windows or (None,) for usage in usages]
    repeated = inputs.texts if parameters.return_text else None
    function = _function(context.manifest, parameters)
    prepared = encoder.prepared(_State(scorer, kept, repeated, windows, function))
    return prepared._replace(texts=len(texts), usage=usages if parameters.return_usage else None)


def _encode_roles(
    query: list[Input[str]], texts: list[Input[str]], rule: LongTextRule, context: TaskContext
) -> tuple[TextEncoder, list[Kept]]:
    """Return the encodings of a query and of the texts, as documents."""
    if rule.choice == "window":
        problem = "is window, which late interaction does not divide texts into; leave it out"
        raise InvalidRequest(problem, Location(("long_text",)))
    encoder, of_query = late_interaction.encode(query, Role.QUERY, rule, context)
    documents, of_documents = late_interaction.encode(texts, Role.DOCUMENT, rule, context)
    encoder.texts += documents.texts
    context.limits.check_results(encoder.tokens, "the request compares", "vectors")
    return encoder, of_query + of_documents


def decode(state: _State, outputs: Outputs, context: TaskContext) -> Ranking:
    """Return the ranking."""
    if state.scorer == "classifier":
        name = sequence_classification.HEAD.name
        scores = [float(output[name].array[0]) for output in outputs]  # the only label's
    elif state.scorer == "late-interaction":
        options = late_interaction.interaction(context.manifest)
        assert options is not None  # `prepare` saw them
        query, *documents = late_interaction.vectors(outputs, state.kept)
        scores = late_interaction.scores(query, documents, options)
    else:
        scores = similarity.cosines_to_first(outputs)
    rest = iter(scores)
    # The score and the characters of each text's best window.
    best = [
        max(((next(rest), place) for place in places), key=lambda scored: scored[0])
        for places in state.windows
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
