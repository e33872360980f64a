"""Entities of labels that the request names.

Words, scores and the choice among spans that overlap are those of the library gliner 0.2.29. A text
that has more words or tokens than the model reads is cut or, with ``long_text: "window"``, divided
into overlapping windows. All windows repeat the labels, and one choice is made for the whole text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field

from cloze.model_store import entity_spans
from cloze.model_store.batch import Encoding
from cloze.model_store.entity_spans import Bounds, EntityPrompt
from cloze.model_store.heads.entities import HEAD, EntityKind, EntityOptions
from cloze.model_store.sequences import TEXT_TOKENS
from cloze.service.errors import EmptyRequest, InvalidRequest, Location, TextTooLong, TooMany
from cloze.service.tasks.label_vectors import LabelVectors
from cloze.service.tasks.task import (
    UP_TO,
    Input,
    Outputs,
    PreparedRequest,
    Task,
    TaskContext,
    TextUsage,
    check_has_tokens,
)
from cloze.service.tasks.texts import (
    EncodedText,
    LongText,
    LongTextRule,
    TextEncoder,
    UsageParameters,
)
from cloze.service.tasks.wire import NotEmpty, Text, Texts, check_range
from cloze.service.threads import check_awaited

LABELS: Final = Location(("labels",))
MOST_LABELS: Final = 100
MOST_LABELS_OF_BI_ENCODER: Final = 1000
LABEL_CHARACTERS: Final = 200

_MOST_SCORES: Final = 12 * 2**21
"""Most scores of a request, one per word, label and width of a span; they take 100 MB."""

_MOST_CANDIDATES: Final = 2**17
"""Most spans above the threshold of a request, among which entities are chosen."""

_MOST_CHARACTERS: Final = 2**22
"""Most characters of the entities of a request and their labels, unless its texts have more.

With several labels per span, or with spans inside others, entities repeat a text. For example, a
word of 1 MB may have 1,000 labels.
"""

_THRESHOLD: Final = 0.5

_INLINE_LABELS: Final = 16
"""Most labels of a short request whose texts, each with all labels, the event loop prepares."""

Labels = Texts | dict[str, Text]


class EntityParameters(UsageParameters):
    """The parameters of gliner's ``predict_entities``, and what to do with long texts."""

    labels: Labels | None = None
    """the labels of the entities to find, or an object with a description of each, which the model
    reads in place of the label; needed"""
    threshold: float | None = Field(None, json_schema_extra={"minimum": 0, "maximum": 1})
    """score that entities exceed; the default is 0.5"""
    flat_ner: bool | None = None
    """whether entities share no words; else one may lie inside another; the default is true"""
    multi_label: bool | None = None
    """whether a span may have several labels; the default is false"""
    long_text: LongText | None = None
    """error refuses a long text, truncate cuts it, window divides it; the default is truncate"""


@dataclass(frozen=True, slots=True)
class Entity:
    """An entity; ``text`` is the part of the input from ``start`` to ``end``, in characters."""

    start: int
    end: int
    text: str
    label: str
    score: float


class EntityText(NamedTuple):
    """A text with the places of its words, and the (first, end) words of each window."""

    text: str
    words: list[Bounds]
    windows: list[Bounds]


class EntityTexts(NamedTuple):
    """The texts of a request, and how their logits become entities."""

    texts: list[EntityText]
    labels: list[str]
    parameters: EntityParameters
    options: EntityOptions


def prepare(
    inputs: Any, parameters: EntityParameters, context: TaskContext
) -> PreparedRequest[EntityTexts]:
    """Tokenize the words of the texts, each text behind the labels."""
    options = context.manifest.heads[HEAD.name]
    assert isinstance(options, EntityOptions)
    if parameters.threshold is not None:
        check_range(parameters.threshold, 0, 1, "threshold")
    limits, tokenizer = context.limits, context.tokenizer
    texts: list[Input[str]] = limits.checked(inputs, may_be_empty=True)
    names, labels = _names(parameters.labels, context)
    prompt, vectors = _prompt(labels, options, context)
    rule = LongTextRule(parameters.long_text or "truncate", report=parameters.return_usage)
    encoder = TextEncoder(rule, context, limits.max_tokens)
    around = TEXT_TOKENS + len(prompt.ids)
    room = limits.max_tokens - around
    prepared, scores = [], 0
    for at, text in texts:
        places = list(entity_spans.split_words(text))
        ids = tokenizer.word_ids([text[first:end] for first, end in places])
        # A word without tokens, such as a character of width 0, has no row.
        words = [(place, one[:room]) for place, one in zip(places, ids, strict=True) if one]
        lengths = [len(one) for _, one in words]
        windows = _windows(lengths, room, options) if words else []
        tokens = around + sum(lengths)
        if len(windows) > 1 and rule.choice == "error":
            _refuse(at, len(words), tokens, limits.max_tokens, options.max_len)
        if rule.choice == "truncate":
            del windows[1:]
        encodings: list[Encoding] = []
        for first, end in windows:
            sequence, request = prompt.sequence([one for _, one in words[first:end]])
            encodings.append(tokenizer.encode(sequence, {HEAD.name: request}))
            encoder.count(at, len(encodings[-1]))
            scores += (end - first) * len(names) * options.logits
            if scores > _MOST_SCORES:
                product = f"words times labels times {options.logits} per pair are {scores}"
                problem = f"{product}; the limit of a request is {_MOST_SCORES}"
                raise TooMany(problem, at, UP_TO)
        read = around + sum(lengths[: windows[-1][1]]) if windows else tokens
        usage = TextUsage(tokens, read)
        if len(windows) > 1:
            usage.windows = [(words[a][0][0], words[b - 1][0][1]) for a, b in windows]
        encoder.texts.append(EncodedText(encodings, usage))
        prepared.append(EntityText(text, [place for place, _ in words], windows))
    state = EntityTexts(prepared, names, parameters, options)
    return encoder.prepared(state)._replace(labels=vectors)


def _names(labels: Labels | None, context: TaskContext) -> tuple[list[str], list[str]]:
    """Return the names of the labels, and what the model reads for each."""
    if labels is None:
        raise InvalidRequest("is missing; name at least 1 label", LABELS)
    if not labels:
        raise EmptyRequest("is empty; it needs at least 1 label", LABELS)
    names = list(dict.fromkeys(labels))
    most = MOST_LABELS if context.labels is None else MOST_LABELS_OF_BI_ENCODER
    if len(names) > most:
        raise TooMany(f"has {len(names)} labels; the limit is {most}", LABELS)
    read = list(labels.values()) if isinstance(labels, dict) else names
    kind = "description" if isinstance(labels, dict) else "label"
    for number, label in enumerate([*names, *read]):
        at = LABELS.below(number % len(names))
        if not label.strip():
            raise EmptyRequest(f"is blank; a {kind} needs at least 1 character", at)
        if len(label) > LABEL_CHARACTERS:
            problem = f"has {len(label)} characters; the limit of a {kind} is {LABEL_CHARACTERS}"
            raise TextTooLong(problem, at)
    if len({*read}) < len(read):
        raise InvalidRequest("has two labels with one description", LABELS)
    return names, read


def _prompt(
    labels: list[str], options: EntityOptions, context: TaskContext
) -> tuple[EntityPrompt, LabelVectors | None]:
    """Return the start of each sequence, and the vectors of the labels of a bi-encoder."""
    if context.labels is not None:
        vectors = context.labels.look_up(context.client, labels)
        _check_labels(vectors, context.labels.max_tokens, context.limits.max_request_tokens)
        return EntityPrompt(vectors=vectors.array), vectors
    ids = context.tokenizer.word_ids(labels)
    for number, one in enumerate(ids):
        check_has_tokens(one, LABELS.below(number))
    prompt = EntityPrompt.of(ids, options)
    if len(prompt.ids) > (most := context.limits.max_tokens // 2):
        problem = f"has {len(prompt.ids)} tokens with their markers; the limit is {most}, half of"
        raise TextTooLong(f"{problem} what the model reads", LABELS)
    return prompt, None


def _check_labels(labels: LabelVectors, most_of_label: int, most: int) -> None:
    """Check the tokens of the labels of a bi-encoder whose vectors are missing."""
    for row, encoding in labels.missing.values():
        check_has_tokens(encoding.input_ids[1:-1].tolist(), LABELS.below(row))
        if (tokens := len(encoding)) > most_of_label:
            problem = f"has {tokens} tokens; the model reads {most_of_label} of a label"
            raise TextTooLong(problem, LABELS.below(row))
    if labels.tokens > most:
        raise TooMany(f"hold {labels.tokens} tokens; the limit of a request is {most}", LABELS)


def _refuse(at: Location, words: int, tokens: int, max_tokens: int, max_words: int) -> None:
    problem = f"has {words} words and with the labels {tokens} tokens"
    limit = f"the model reads {max_words} words and {max_tokens} tokens"
    raise TextTooLong(f"{problem}; {limit}, and long_text is error", at)


def _windows(lengths: Sequence[int], room: int, options: EntityOptions) -> list[Bounds]:
    """Return the (first, end) words of windows, by the tokens of each word.

    Neighbouring windows share as many words as a span may have, or a quarter where words have
    logits, so that each entity lies in one window. For example, windows of at most 6 words that
    share 2 divide 10 words into (0, 6) and (4, 10).
    """
    windows: list[Bounds] = []
    first = end = tokens = 0
    while end < len(lengths):
        while end < len(lengths) and end - first < options.max_len:
            if tokens + lengths[end] > room:
                break
            tokens += lengths[end]
            end += 1
        windows.append((first, end))
        shared = options.max_width if options.kind is EntityKind.SPAN else (end - first) // 4
        new = max(first + 1, end - shared)
        tokens -= sum(lengths[first:new])
        first = new
    return windows


def decode(state: EntityTexts, outputs: Outputs, context: TaskContext) -> list[list[Entity]]:
    """Return the entities of each text, sorted by their starts."""
    found = find(state, outputs)
    context.limits.check_results(sum(map(len, found)), "the request has", "entities")
    return found


def find(state: EntityTexts, outputs: Outputs) -> list[list[Entity]]:
    """Return the entities of each text, however many."""
    parameters, kind = state.parameters, state.options.kind
    threshold = _THRESHOLD if parameters.threshold is None else parameters.threshold
    multi_label, flat = bool(parameters.multi_label), parameters.flat_ner is not False
    rest, count, characters = iter(outputs), 0, 0
    most_characters = max(_MOST_CHARACTERS, sum(len(text.text) for text in state.texts))
    results: list[list[Entity]] = []
    for text in state.texts:
        check_awaited()
        windows = []
        for first, _ in text.windows:
            logits = next(rest)[HEAD.name].array
            count += entity_spans.count_candidates(logits, threshold, kind)
            if count > _MOST_CANDIDATES:
                raise TooMany(
                    f"{count} spans or more exceed the threshold {threshold}; the limit of a "
                    f"request is {_MOST_CANDIDATES}"
                )
            windows.append((first, entity_spans.find_candidates(logits, threshold, kind)))
        if not windows:
            results.append([])
            continue
        spans = entity_spans.pooled(windows)
        chosen = entity_spans.choose(spans, len(text.words), flat=flat, multi_label=multi_label)
        entities = []
        for number in chosen:
            start, end = text.words[spans.starts[number]][0], text.words[spans.ends[number]][1]
            label, score = state.labels[spans.labels[number]], float(spans.scores[number])
            characters += end - start + len(label)
            if characters > most_characters:
                raise TooMany(
                    f"the entities and their labels have {characters} characters or more; the "
                    f"limit of a request is {most_characters}"
                )
            entities.append(Entity(start, end, text.text[start:end], label, score))
        results.append(entities)
    return results


def _needs_thread(asked: EntityParameters) -> bool:
    """Return whether a short request may have many candidates, or texts behind many labels."""
    is_low = asked.threshold is not None and asked.threshold < _THRESHOLD / 2
    return is_low or len(asked.labels or ()) > _INLINE_LABELS


TASK: Final = Task(
    name="entities",
    route="/entities",
    summary="The entities of the request's own labels, with character offsets",
    heads=(HEAD.name,),
    inputs=Annotated[
        str | Annotated[list[str], NotEmpty], Field(description="a text, or a list of texts")
    ],
    parameters=EntityParameters,
    result=list[Entity] | list[list[Entity]],
    alone=(str,),
    own_parameters=("labels", "flat_ner"),
    needs_thread=_needs_thread,
    prepare=prepare,
    decode=decode,
    scores=lambda *_: "probability",
    examples={
        "Labels": {
            "inputs": "Ada Lovelace was born in London.",
            "parameters": {"labels": ["person", "city"]},
        },
        "Labels with descriptions": {
            "inputs": ["Siemens paid 300 euros."],
            "parameters": {
                "labels": {"ORG": "company", "MONEY": "amount"},
                "threshold": 0.3,
            },
        },
    },
)
