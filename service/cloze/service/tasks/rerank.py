"""Reranking: texts in the order of their relevance to a query.

A reranker gives the scores: a classifier of pairs with one label, or with two of which the second
means relevant. Without one, late interaction gives them, and else the similarity of embeddings. A
long text is cut or, with ``long_text: "window"``, divided; then its best window gives the score.
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
from cloze.service.tasks.wire import CountOrZero, Text, Texts, WireModel


class RerankInputs(WireModel):
    """A query, and the texts to rank."""

    query: Text = Field(examples=["What is deep learning?"])
    texts: Texts = Field(examples=[["A ship left the harbour.", "Networks with many layers."]])


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Texts to score, each with a query of its own."""

    queries: list[str]
    texts: list[str]


class RerankParameters(TruncationParameters, UsageParameters):
    """The parameters of text-embeddings-inference, and windows."""

    raw_scores: bool | None = None
    """whether a classifier's scores are its logits, and not their sigmoid"""
    return_text: bool = Field(False, description="whether the ranks repeat the texts")
    max_tokens_per_doc: CountOrZero | None = None
    """tokens to keep of each text, from its start; 0 or null keeps all"""


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

    The function makes scores of what the texts are ranked by, so that saturation ties none. There
    is one query, or one per text.
    """

    scorer: Scorer
    queries: int
    kept: list[Kept]
    texts: list[str] | None
    windows: Sequence[Sequence[tuple[int, int] | None]]
    function: text_classification.Function


QUERY: Final = Location(("query",))
QUERIES: Final = Location(("queries",))
TEXTS: Final = Location(("texts",))


def scorer_of(manifest: Manifest) -> Scorer:
    """Return what scores the texts of a model: a classifier if it is a reranker."""
    options = manifest.heads.get(sequence_classification.HEAD.name)
    if isinstance(options, sequence_classification.SequenceLabels) and options.is_reranker:
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
    inputs: RerankInputs | TextPairs, parameters: RerankParameters, context: TaskContext
) -> PreparedRequest[_State]:
    """Tokenize the query with the texts, or each text with its query."""
    scorer, limits = scorer_of(context.manifest), context.limits
    if isinstance(inputs, TextPairs):
        queries = limits.checked(inputs.queries, QUERIES)
    else:
        queries = limits.checked(inputs.query, QUERY)
    others = len(queries) if scorer == "similarity" or len(queries) > 1 else 0
    texts = limits.checked(inputs.texts, TEXTS, others=0 if scorer == "classifier" else others)
    texts, cut = _shortened(texts, parameters.max_tokens_per_doc, context)
    report = parameters.return_usage or parameters.long_text == "window"
    rule = parameters.rule(report=report)._replace(divides_pairs=True)
    kept: list[Kept] = []
    if scorer == "classifier":
        asked = queries * len(texts) if len(queries) == 1 else queries
        pairs = [(at, q, text) for (_, q), (at, text) in zip(asked, texts, strict=True)]
        encoder = encode_pairs(pairs, rule, context, text_classification.REQUEST)
    elif scorer == "late-interaction":
        encoder, kept = _encode_roles(queries, texts, rule, context)
    else:
        prompts = [context.prompt_of(Role.QUERY)] * len(queries)
        prompts += [context.prompt_of(Role.DOCUMENT)] * len(texts)
        encoder = encode_texts([*queries, *texts], rule, context, VECTORS, prompts=prompts)
        if (usage := encoder.texts[0].usage).windows:
            problem = f"has {usage.tokens} tokens; long_text window divides only texts"
            raise TextTooLong(problem, QUERY)
    usages = [text.usage for text in encoder.texts[-len(texts) :]]  # without the queries'
    windows = [usage.windows or (None,) for usage in usages]
    repeated = inputs.texts if parameters.return_text else None
    function = _function(context.manifest, parameters)
    state = _State(scorer, len(queries), kept, repeated, windows, function)
    prepared = encoder.prepared(state)
    return prepared._replace(
        texts=len(texts),
        truncated=prepared.truncated + cut,
        usage=usages if parameters.return_usage else None,
    )


def _shortened(
    texts: list[Input[str]], most: int | None, context: TaskContext
) -> tuple[list[Input[str]], int]:
    """Return texts of at most so many tokens, and how many of the texts were longer."""
    if most is not None and most < 0:
        raise InvalidRequest(f"must be at least 0, got {most}", Location(("max_tokens_per_doc",)))
    if not most or most >= context.limits.max_tokens:
        return texts, 0
    kept = []
    for at, text in texts:
        spans = context.tokenizer.spans(text)
        kept.append((at, text[: spans.ends[most - 1]] if len(spans.ids) > most else text))
    return kept, sum(len(a) < len(b) for (_, a), (_, b) in zip(kept, texts, strict=True))


def _encode_roles(
    queries: list[Input[str]], texts: list[Input[str]], rule: LongTextRule, context: TaskContext
) -> tuple[TextEncoder, list[Kept]]:
    """Return the encodings of queries and of the texts, as documents."""
    if rule.choice == "window":
        problem = "is window, which late interaction does not divide texts into; leave it out"
        raise InvalidRequest(problem, Location(("long_text",)))
    encoder, of_queries = late_interaction.encode(queries, Role.QUERY, rule, context)
    documents, of_documents = late_interaction.encode(texts, Role.DOCUMENT, rule, context)
    encoder.texts += documents.texts
    context.limits.check_results(encoder.tokens, "the request compares", "vectors")
    return encoder, of_queries + of_documents


def _relevances(state: _State, outputs: Outputs, context: TaskContext) -> list[float]:
    """Return what each encoding of a text is ranked by."""
    if state.scorer == "classifier":
        labels = text_classification.sequence_labels(context.manifest)
        name = sequence_classification.HEAD.name
        return [labels.relevance(output[name].array) for output in outputs]
    if state.scorer == "similarity":
        queries, texts = outputs[: state.queries], outputs[state.queries :]
        if len(queries) == 1:
            return similarity.cosines_to_first(outputs)
        pairs = zip(queries, texts, strict=True)
        return [similarity.cosines_to_first(pair)[0] for pair in pairs]
    options = late_interaction.interaction(context.manifest)
    assert options is not None  # `prepare` saw them
    vectors = late_interaction.vectors(outputs, state.kept)
    of_queries, of_texts = vectors[: state.queries], vectors[state.queries :]
    if len(of_queries) == 1:
        return late_interaction.scores(of_queries[0], of_texts, options)
    rows = zip(of_queries, of_texts, strict=True)
    return [late_interaction.scores(query, [text], options)[0] for query, text in rows]


def decode(state: _State, outputs: Outputs, context: TaskContext) -> Ranking:
    """Return the ranking."""
    scores = _relevances(state, outputs, context)
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
