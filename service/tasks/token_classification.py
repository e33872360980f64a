"""Token classification: the named entities of a text.

Scores and groups are those of transformers' pipeline. A long text is cut or, with ``stride`` or
``long_text: "window"``, divided into overlapping windows. If entities of two windows overlap, the
longer entity is kept. If both have the same length, the likelier entity is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field

from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import HeadRequest, token_classification
from cloze.model_store.heads.token_classification import TokenLabels
from cloze.service.core import Float32, InvalidRequest
from cloze.service.tasks.long_text import (
    Bounds,
    LongText,
    LongTextRule,
    TextEncoder,
    UsageParameters,
)
from cloze.service.tasks.task import (
    CountOrZero,
    Example,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    Text,
    Texts,
    check_range,
    check_text,
    check_tokens,
    listed,
    softmax,
)
from cloze.service.tokenizer import Spans, Tokenizer

Strategy = Literal["none", "simple", "first", "average", "max"]

_TOKENS_PER_RESULT = 4
"""Number of tokens whose decoding costs about as much as one prediction of a mask."""


class TokenClassificationParameters(UsageParameters):
    """The parameters that huggingface_hub's ``token_classification`` sends, and our own."""

    aggregation_strategy: Strategy | None = Field(
        None,
        description="grouping of tokens: none (every token is a result), simple (neighbours "
        "with the same label form an entity), first, average or max (each word gets one label, "
        "then neighbours form an entity); the default is simple",
    )
    ignore_labels: list[str] | None = Field(None, description="labels to omit; the default is O")
    stride: CountOrZero | None = Field(
        None,
        description="number of tokens that neighbouring windows of a long text share; "
        "the default is to cut the text",
    )
    long_text: LongText | None = Field(
        None,
        description="error refuses a long text, truncate cuts it, window divides it and joins the "
        "entities of its windows; the default is truncate, with stride window",
    )


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


@dataclass(frozen=True, slots=True)
class _Text:
    """A text with its tokens and the (first, end) tokens of its windows."""

    text: str
    spans: Spans
    windows: Sequence[Bounds]


@dataclass(frozen=True, slots=True)
class _State:
    texts: list[_Text]
    strategy: Strategy
    ignored: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Token:
    """A token with the scores [L] float32 of all labels."""

    index: int
    word: str
    start: int
    end: int
    continues_word: bool
    scores: Float32


@dataclass(frozen=True, slots=True)
class _LabelledTokens:
    """One or more tokens that share a label."""

    label: str
    score: float
    words: list[str]
    index: int
    start: int
    end: int


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[_State]:
    """Tokenize the texts, long texts in windows if the client asks.

    Raises:
        EmptyRequest: there is no text, or a text is empty.
        InvalidRequest: a text has no token, or is too long and long texts are refused; or its
            windows have more tokens than a request may; or a parameter is out of its limits, or
            contradicts another one.
    """
    parameters: TokenClassificationParameters = call.parameters
    limits = context.limits
    texts = listed(call.inputs, limits)
    strategy: Strategy = parameters.aggregation_strategy or "simple"
    choice = _long_text(parameters, strategy, limits.max_tokens - 2)
    rule = LongTextRule(choice, stride=parameters.stride, report=bool(parameters.return_usage))
    encoder = TextEncoder(rule, context, _REQUEST)
    prepared: list[_Text] = []
    for at, text in texts:
        check_text(text, at, limits)
        spans = context.tokenizer.spans(text)
        check_tokens(spans.ids, at)
        prepared.append(_Text(text, spans, encoder.add(at, spans.ids, text)))
    ignored = frozenset(["O"] if parameters.ignore_labels is None else parameters.ignore_labels)
    state = _State(prepared, strategy, ignored)
    return encoder.prepared(state, sum(map(len, encoder.encodings)) // _TOKENS_PER_RESULT)


_REQUEST: Final = {token_classification.HEAD.name: HeadRequest()}


def _long_text(
    parameters: TokenClassificationParameters, strategy: Strategy, window_tokens: int
) -> LongText:
    """Return what to do with a long text.

    Raises:
        InvalidRequest: the stride is out of its limits, or parameters contradict each other.
    """
    stride, choice = parameters.stride, parameters.long_text
    if stride is not None:
        check_range(stride, 0, window_tokens - 1, "stride")
        if choice not in (None, "window"):
            raise InvalidRequest(f"stride divides a long text, but long_text is {choice}")
        choice = "window"
    if choice == "window" and strategy == "none":
        asked = "stride" if stride is not None else "long_text window"
        raise InvalidRequest(
            f"{asked} needs an aggregation_strategy other than none: "
            "tokens of overlapping windows cannot be told apart"
        )
    return choice or "truncate"


def decode(
    prepared: PreparedRequest[_State], outputs: Sequence[HeadOutputs], context: TaskContext
) -> list[Entities]:
    """Return the entities of each text."""
    rest = iter(outputs)
    state = prepared.state
    results: list[Entities] = []
    for text in state.texts:
        logits = [next(rest)[token_classification.HEAD.name].array for _ in text.windows]
        results.append(_entities(text, logits, state, context))
    return results


def _entities(
    text: _Text, logits: Sequence[Float32], state: _State, context: TaskContext
) -> Entities:
    """Return the entities of all windows of a text."""
    options = context.manifest.heads[token_classification.HEAD.name]
    assert isinstance(options, TokenLabels)
    labelled: list[_LabelledTokens] = []
    for (first, end), window in zip(text.windows, logits, strict=True):
        tokens = _tokens(text, first, end, softmax(window[1:-1]), context.tokenizer)
        labelled += _label(tokens, state.strategy, options.labels)
    kept = [entity for entity in labelled if entity.label not in state.ignored]
    if len(text.windows) > 1:
        kept = _without_overlaps(kept)
    if state.strategy == "none":
        return [TokenEntity(e.label, e.score, e.index, e.words[0], e.start, e.end) for e in kept]
    join = context.tokenizer.join
    return [EntityGroup(e.label, e.score, join(e.words), e.start, e.end) for e in kept]


def _tokens(
    text: _Text, first: int, end: int, scores: Float32, tokenizer: Tokenizer
) -> list[_Token]:
    """Return the tokens of a window.

    In a vocabulary that marks tokens which continue a word, such a token is longer than its
    characters in the text. In another one, a token without a space before it or at its start
    continues a word. The characters of the text replace the unknown token, which begins a word.
    """
    tokens = []
    for position in range(first, end):
        start, stop = text.spans.offsets[position]
        characters = text.text[start:stop]
        word, continues = tokenizer.token_of(text.spans.ids[position]), False
        if text.spans.ids[position] == tokenizer.unknown_id:
            word = characters
        elif tokenizer.continuation is not None:
            continues = len(word) != len(characters)
        else:
            continues = start > 0 and " " not in text.text[start - 1 : start + 1]
        index = position - first + 1  # the index of [CLS] is 0
        tokens.append(_Token(index, word, start, stop, continues, scores[position - first]))
    return tokens


def _label(
    tokens: list[_Token], strategy: Strategy, labels: Sequence[str]
) -> list[_LabelledTokens]:
    """Label the tokens of a window, and group the tokens by the strategy."""
    by_token = strategy in ("none", "simple")
    words = [[token] for token in tokens] if by_token else _words(tokens)
    labelled = [_label_word(word, strategy, labels) for word in words]
    return labelled if strategy == "none" else _group(labelled)


def _words(tokens: list[_Token]) -> list[list[_Token]]:
    """Return the tokens grouped by word."""
    words: list[list[_Token]] = []
    for token in tokens:
        if words and token.continues_word:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _label_word(word: list[_Token], strategy: Strategy, labels: Sequence[str]) -> _LabelledTokens:
    """Label a word by its first token, its most certain token (max), or the mean of its tokens."""
    scores = word[0].scores
    if strategy == "max":
        scores = max(word, key=lambda token: float(token.scores.max())).scores
    elif strategy == "average":
        scores = np.mean([token.scores for token in word], axis=0)
    best = int(scores.argmax())
    return _LabelledTokens(
        labels[best],
        float(scores[best]),
        [token.word for token in word],
        word[0].index,
        word[0].start,
        word[-1].end,
    )


def _group(labelled: list[_LabelledTokens]) -> list[_LabelledTokens]:
    """Join neighbours with the same tag to entities; a label with ``B-`` begins a new entity."""
    groups: list[list[_LabelledTokens]] = []
    for entity in labelled:
        begins, tag = _tag(entity.label)
        if groups and not begins and tag == _tag(groups[-1][-1].label)[1]:
            groups[-1].append(entity)
        else:
            groups.append([entity])
    return [
        _LabelledTokens(
            group[0].label.split("-", 1)[-1],
            float(np.mean([entity.score for entity in group])),
            [word for entity in group for word in entity.words],
            group[0].index,
            group[0].start,
            group[-1].end,
        )
        for group in groups
    ]


def _tag(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and the tag: the label without ``B-`` or ``I-``."""
    if label.startswith(("B-", "I-")):
        return label.startswith("B-"), label[2:]
    return False, label


def _without_overlaps(entities: list[_LabelledTokens]) -> list[_LabelledTokens]:
    """Return the entities without overlaps: the longest entity is kept, then the likeliest."""
    kept: list[_LabelledTokens] = []
    for entity in sorted(entities, key=lambda entity: entity.start):
        if not kept or entity.start >= kept[-1].end:
            kept.append(entity)
        elif _rank(entity) > _rank(kept[-1]):
            kept[-1] = entity
    return kept


def _rank(entity: _LabelledTokens) -> tuple[int, float]:
    return entity.end - entity.start, entity.score


TASK: Final = Task(
    name="token-classification",
    route="/token-classification",
    summary="The entities of a text, with character offsets",
    heads=(token_classification.HEAD.name,),
    inputs=Annotated[
        Text | Texts,
        Field(
            description="a text, or a list of texts",
            examples=["Ada Lovelace was born in London."],
        ),
    ],
    parameters=TokenClassificationParameters,
    result=Entities | list[Entities],
    alone=(str,),
    prepare=prepare,
    decode=decode,
    examples=(
        Example("Entities", {"inputs": "Ada Lovelace was born in London."}),
        Example(
            "Every token",
            {
                "inputs": "Ada Lovelace was born in London.",
                "parameters": {"aggregation_strategy": "none"},
            },
        ),
    ),
)
