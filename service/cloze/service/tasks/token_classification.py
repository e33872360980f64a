"""Token classification: the named entities of a text.

Scores and groups are those of transformers' pipeline, but tags that mark the ends of entities, such
as BIOES, are joined too. A long text is cut or, with ``stride`` or ``long_text: "window"``, divided
into overlapping windows. Of two entities that overlap, the longer is kept, then the likelier.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field

from cloze.model_store.heads import HeadRequest, token_classification
from cloze.model_store.heads.token_classification import as_iob2
from cloze.model_store.sequences import TEXT_TOKENS, without_space
from cloze.service.core import Float32
from cloze.service.errors import InvalidRequest
from cloze.service.tasks.task import (
    Outputs,
    PreparedRequest,
    Task,
    TaskContext,
    check_has_tokens,
    softmax,
)
from cloze.service.tasks.texts import Bounds, LongText, LongTextRule, TextEncoder, UsageParameters
from cloze.service.tasks.wire import CountOrZero, Text, Texts, check_range
from cloze.service.text.tokenizer import NO_WORD, Spans, Tokenizer, Words

Strategy = Literal["none", "simple", "first", "average", "max"]


class TokenClassificationParameters(UsageParameters):
    """The parameters that huggingface_hub's ``token_classification`` sends, and our own."""

    aggregation_strategy: Strategy | None = None
    """grouping of tokens: none (every token is a result), simple (neighbours with the same label
    form an entity), first, average or max (each word gets one label, then neighbours form an
    entity); the default is simple"""
    words: Words | None = None
    """where words of first, average and max begin: as for transformers' pipeline, which divides at
    spaces unless the tokenizer is WordPiece, or as for the tokenizer; the default is
    transformers"""
    label_set: str | None = None
    """name of one of the model's label sets; the default is the first"""
    ignore_labels: list[str] | None = None
    """labels to omit; the default is O"""
    stride: CountOrZero | None = None
    """number of tokens that neighbouring windows of a long text share; the default is to cut the
    text"""
    long_text: LongText | None = None
    """error refuses a long text, truncate cuts it, window divides it and joins the entities of its
    windows; the default is truncate, with stride window"""


@dataclass(frozen=True, slots=True)
class TokenEntity:
    """A token and its label; ``text[start:end]`` is the token, in characters."""

    entity: str
    score: float
    index: int
    word: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class EntityGroup:
    """Tokens of one label; ``text[start:end]`` is the entity, in characters."""

    entity_group: str
    score: float
    word: str
    start: int
    end: int


Entities = list[TokenEntity] | list[EntityGroup]

_REQUEST: Final = {token_classification.HEAD.name: HeadRequest()}


class TaggedText(NamedTuple):
    """A text with the tokens that its windows have, and the (first, end) tokens of each window."""

    text: str
    spans: Spans
    windows: Sequence[Bounds]


class TaggedTexts(NamedTuple):
    """The texts of a request, and how their logits become entities."""

    labels: tuple[str, ...]
    logits: slice
    texts: list[TaggedText]
    strategy: Strategy
    ignored: frozenset[str]


@dataclass(frozen=True, slots=True)
class LabelledSpan:
    """One or more tokens that share a label."""

    label: str
    score: float
    words: list[str]
    index: int
    start: int
    end: int


def prepare(
    inputs: Any, parameters: TokenClassificationParameters, context: TaskContext
) -> PreparedRequest[TaggedTexts]:
    """Tokenize the texts, long texts in windows if the client asks."""
    limits = context.limits
    texts = limits.checked(inputs)
    strategy: Strategy = parameters.aggregation_strategy or "simple"
    by_word = strategy not in ("none", "simple")
    words: Words = (parameters.words or "transformers") if by_word else "tokenizer"
    stride, choice = parameters.stride, parameters.long_text
    if stride is not None:
        check_range(stride, 0, limits.max_tokens - TEXT_TOKENS - 1, "stride")
        if choice not in (None, "window"):
            raise InvalidRequest(f"stride divides a long text, but long_text is {choice}")
        choice = "window"
    if choice == "window" and strategy == "none":
        asked = "stride" if stride is not None else "long_text window"
        raise InvalidRequest(
            f"{asked} needs an aggregation_strategy other than none: "
            "tokens of overlapping windows cannot be told apart"
        )
    rule = LongTextRule(choice or "truncate", stride=stride, report=parameters.return_usage)
    encoder = TextEncoder(rule, context, limits.max_tokens, _REQUEST)
    prepared: list[TaggedText] = []
    for at, text in texts:
        spans = context.tokenizer.spans(text, words=words)
        check_has_tokens(spans.ids, at)
        windows = encoder.add(at, spans.ids, text)
        prepared.append(TaggedText(text, spans.part(0, windows[-1][1]), windows))
    ignored = frozenset(["O"] if parameters.ignore_labels is None else parameters.ignore_labels)
    chosen, columns = context.label_set(token_classification.HEAD, parameters.label_set)
    return encoder.prepared(TaggedTexts(chosen.labels, columns, prepared, strategy, ignored))


def decode(state: TaggedTexts, outputs: Outputs, context: TaskContext) -> list[Entities]:
    """Return the entities of each text."""
    join = context.tokenizer.join
    results: list[Entities] = []
    for text, kept in found(state, outputs, context):
        if len(text.windows) > 1:
            kept = _without_overlaps(kept)
        if state.strategy == "none":
            results.append(
                [TokenEntity(e.label, e.score, e.index, e.words[0], e.start, e.end) for e in kept]
            )
        else:
            results.append(
                [EntityGroup(e.label, e.score, join(e.words), e.start, e.end) for e in kept]
            )
    return results


def found(
    state: TaggedTexts, outputs: Outputs, context: TaskContext
) -> Iterator[tuple[TaggedText, list[LabelledSpan]]]:
    """Yield each text with the entities of its windows; those of two windows may overlap."""
    rest = iter(outputs)
    for text in state.texts:
        entities: list[LabelledSpan] = []
        for window in text.windows:
            logits = next(rest)[token_classification.HEAD.name].array[:, state.logits]
            labelled = _labelled(state, text, window, softmax(logits[1:-1]), context.tokenizer)
            is_grouped = state.strategy != "none"
            entities += _grouped(labelled, state.labels, text.text) if is_grouped else labelled
        yield text, [entity for entity in entities if entity.label not in state.ignored]


def _labelled(
    state: TaggedTexts, text: TaggedText, window: Bounds, scores: Float32, tokenizer: Tokenizer
) -> list[LabelledSpan]:
    """Label the words of a window, or its tokens if the strategy labels tokens.

    A word has the label of its first token, of its most certain token (max), or of the mean of its
    tokens' scores [S, L].
    """
    spans = text.spans.part(*window)
    shown = [  # the characters of the text replace the unknown token
        text.text[start:end] if token == tokenizer.unknown_id else tokenizer.token_of(token)
        for token, (start, end) in zip(spans.ids, spans.offsets(), strict=True)
    ]
    firsts = list(range(len(shown)))
    if state.strategy not in ("none", "simple"):
        before = [NO_WORD, *spans.words]
        firsts = [n for n, word in enumerate(spans.words) if word == NO_WORD or word != before[n]]
    labelled = []
    for first, end in pairwise([*firsts, len(shown)]):
        rows = scores[first:end]
        chosen = rows[0]
        if state.strategy == "max":
            chosen = rows[rows.max(1).argmax()]
        elif state.strategy == "average":
            chosen = rows.mean(0)
        best = int(chosen.argmax())
        places = spans.starts[first], spans.ends[end - 1]
        index = first + 1  # that of [CLS] is 0
        labelled.append(
            LabelledSpan(state.labels[best], float(chosen[best]), shown[first:end], index, *places)
        )
    return labelled


def _grouped(
    labelled: list[LabelledSpan], labels: tuple[str, ...], text: str
) -> list[LabelledSpan]:
    """Join neighbours with the same tag; a label with ``B-`` begins a new entity."""
    groups: list[list[LabelledSpan]] = []
    previous = ""
    for entity, label in zip(labelled, as_iob2([e.label for e in labelled], labels), strict=True):
        tag = label[2:] if label.startswith(("B-", "I-")) else label
        if groups and tag == previous and not label.startswith("B-"):
            groups[-1].append(entity)
        else:
            groups.append([entity])
        previous = tag
    places = without_space(text, [(group[0].start, group[-1].end) for group in groups])
    return [
        replace(
            group[0],
            label=entity_group(group[0].label),
            score=float(np.mean([entity.score for entity in group])),
            words=[word for entity in group for word in entity.words],
            start=start,
            end=end,
        )
        for group, (start, end) in zip(groups, places, strict=True)
    ]


def entity_group(label: str) -> str:
    """Return the label of an entity whose first token has a label."""
    return label.split("-", 1)[-1]


def _without_overlaps(entities: list[LabelledSpan]) -> list[LabelledSpan]:
    """Return the entities without overlaps: the longest entity is kept, then the likeliest."""
    kept: list[LabelledSpan] = []
    for entity in sorted(entities, key=lambda entity: entity.start):
        if not kept or entity.start >= (last := kept[-1]).end:
            kept.append(entity)
        elif (entity.end - entity.start, entity.score) > (last.end - last.start, last.score):
            kept[-1] = entity
    return kept


def _prepare_logits(
    inputs: Any, parameters: TokenClassificationParameters, context: TaskContext
) -> PreparedRequest[TaggedTexts]:
    prepared = prepare(inputs, parameters, context)
    tokens = sum(len(encoding) for encoding in prepared.encodings)
    context.limits.check_results(tokens, "the request asks for", "rows of scores")
    return prepared


def _decode_logits(state: TaggedTexts, outputs: Outputs, _: TaskContext) -> list[Float32]:
    """Return the logits [S, L] of each text, special tokens included."""
    return [output[token_classification.HEAD.name].array[:, state.logits] for output in outputs]


TASK: Final = Task(
    name="token-classification",
    route="/token-classification",
    summary="The entities of a text, with character offsets",
    heads=(token_classification.HEAD.name,),
    inputs=Annotated[Text | Texts, Field(description="a text, or a list of texts")],
    parameters=TokenClassificationParameters,
    result=Entities | list[Entities],
    alone=(str,),
    prepare=prepare,
    decode=decode,
    scores=lambda *_: "probability",
    examples={"Entities": {"inputs": "Ada Lovelace was born in London."}},
)

LOGITS: Final = replace(
    TASK, prepare=_prepare_logits, decode=_decode_logits, scores=lambda *_: None
)
"""The task with the logits of all tokens and labels."""
