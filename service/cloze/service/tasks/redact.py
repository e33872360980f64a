"""Redaction: a text whose entities are replaced by placeholders such as ``<PER_1>``.

The entities are those of token classification by words, or of labels that the request names if the
model takes such labels, and of plain patterns if asked for. A long text is read in overlapping
windows. Of two entities that overlap, all characters are replaced.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field

from cloze.model_store.heads import entities as entities_head
from cloze.model_store.heads import token_classification as head
from cloze.service.errors import InvalidRequest, Location, quoted
from cloze.service.tasks import entities, token_classification
from cloze.service.tasks.entities import EntityTexts
from cloze.service.tasks.patterns import Pattern, find, regions
from cloze.service.tasks.task import Outputs, PreparedRequest, Task, TaskContext
from cloze.service.tasks.texts import UsageParameters
from cloze.service.tasks.token_classification import (
    LabelledSpan,
    TaggedTexts,
    TokenClassificationParameters,
    entity_group,
)
from cloze.service.tasks.wire import Text, Texts, check_range

_PLACEHOLDER: Final = re.compile(r"<[^<>]+_\d+>")


class RedactParameters(UsageParameters):
    """What to replace, and how placeholders are numbered."""

    labels: Texts | None = None
    """the labels to replace: of the model, where the default is all but O, or any labels for a
    model of /entities, which needs them"""
    min_score: float | None = Field(None, json_schema_extra={"minimum": 0, "maximum": 1})
    """least score of an entity that is replaced; the default is 0, for a model of /entities 0.5"""
    patterns: list[Pattern] | None = None
    """forms to replace besides: e-mail addresses, telephone numbers, and IBANs and card numbers
    with right check digits; the default is none"""
    region: str | None = None
    """the country, in two letters, of telephone numbers without +; the default is to leave these"""
    across_texts: bool | None = None
    """whether a name has the same number in all texts of the request; the default is false: each
    text is numbered by itself"""
    label_set: str | None = None
    """name of one of the model's label sets; the default is the first"""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A replaced entity: ``text[start:end]`` became ``redacted[redacted_start:redacted_end]``.

    The score of a pattern is 1.
    """

    label: str
    placeholder: str
    text: str
    start: int
    end: int
    redacted_start: int
    redacted_end: int
    score: float


@dataclass(frozen=True, slots=True)
class Redaction:
    """A text with placeholders, and what they replace, in the order of the text."""

    text: str
    replacements: list[Replacement]


class _State(NamedTuple):
    """The texts of a request; the labels are those that are replaced, None for all."""

    tagged: TaggedTexts | EntityTexts
    labels: frozenset[str] | None
    parameters: RedactParameters


def prepare(
    inputs: Any, parameters: RedactParameters, context: TaskContext
) -> PreparedRequest[_State]:
    """Tokenize the texts, long texts in windows."""
    if parameters.min_score is not None:
        check_range(parameters.min_score, 0, 1, "min_score")
    if (region := parameters.region) is not None and region not in regions():
        problem = f"is {quoted(region)}; it needs a country in two capital letters, such as DE"
        raise InvalidRequest(problem, Location(("region",)))
    if head.HEAD not in context.manifest.graph_heads:
        return _prepare_entities(inputs, parameters, context)
    # Only the first token of a word is trained in most taggers, and no word is replaced in part.
    tagging = TokenClassificationParameters(
        aggregation_strategy="first",
        words="tokenizer",
        long_text="window",
        label_set=parameters.label_set,
        return_usage=parameters.return_usage,
    )
    prepared: PreparedRequest[Any] = token_classification.prepare(inputs, tagging, context)
    tagged: TaggedTexts = prepared.state
    labels = _labels(parameters.labels, tagged, context)
    return prepared._replace(state=_State(tagged, labels, parameters))


def _prepare_entities(
    inputs: Any, parameters: RedactParameters, context: TaskContext
) -> PreparedRequest[_State]:
    """Tokenize the texts for a model that finds entities of any labels."""
    if parameters.label_set is not None:
        problem = f"is {quoted(parameters.label_set)}, but {context.manifest.reference} has no sets"
        raise InvalidRequest(problem, Location(("label_set",)))
    for number, label in enumerate(parameters.labels or ()):
        if set("<>") & set(label):
            problem = f"is {quoted(label)}; a placeholder has no < or > within"
            raise InvalidRequest(problem, entities.LABELS.below(number))
    finding = entities.EntityParameters(
        labels=parameters.labels,
        threshold=parameters.min_score,
        long_text="window",
        return_usage=parameters.return_usage,
    )
    prepared: PreparedRequest[Any] = entities.prepare(inputs, finding, context)
    return prepared._replace(state=_State(prepared.state, None, parameters))


def _found(
    state: _State, outputs: Outputs, context: TaskContext
) -> Iterator[tuple[str, list[LabelledSpan]]]:
    """Yield each text with its entities of the labels to replace."""
    if isinstance(state.tagged, EntityTexts):
        texts = zip(state.tagged.texts, entities.find(state.tagged, outputs), strict=True)
        for text, found in texts:
            yield text.text, [LabelledSpan(e.label, e.score, [], 0, e.start, e.end) for e in found]
        return
    least, labels = state.parameters.min_score or 0, state.labels or ()
    for tagged, spans in token_classification.found(state.tagged, outputs, context):
        kept = [e for e in spans if e.label in labels and e.score >= least]
        # A token may be white space, or no character at all.
        yield tagged.text, [e for e in kept if tagged.text[e.start : e.end].strip()]


def _labels(asked: list[str] | None, tagged: TaggedTexts, context: TaskContext) -> frozenset[str]:
    """Return the labels of entities to replace, after a check."""
    known = dict.fromkeys(entity_group(name) for name in tagged.labels if name != "O")
    if asked is None:
        return frozenset(known)
    for at, label in context.limits.checked(asked, Location(("labels",)), "label"):
        if label not in known:
            shown = ascii(", ".join(known))[1:-1][:200]
            problem = f"is {quoted(label)}; {context.manifest.reference} has {shown}"
            raise InvalidRequest(problem, at)
    return frozenset(asked)


def decode(state: _State, outputs: Outputs, context: TaskContext) -> list[Redaction]:
    """Return each text with placeholders."""
    parameters, texts = state.parameters, [text.text for text in state.tagged.texts]
    numbers = _Placeholders(texts) if parameters.across_texts else None
    redactions = []
    for text, found in _found(state, outputs, context):
        for pattern in dict.fromkeys(parameters.patterns or ()):
            places = find(text, pattern, parameters.region)
            found += [LabelledSpan(pattern, 1.0, [], 0, *place) for place in places]
        redactions.append(_redacted(text, _joined(found), numbers or _Placeholders([text])))
    return redactions


def _joined(found: Sequence[LabelledSpan]) -> list[LabelledSpan]:
    """Return all places without overlaps; what overlaps is one place, with the longer's label."""
    joined: list[LabelledSpan] = []
    for each in sorted(found, key=lambda each: (each.start, each.end)):
        if not joined or each.start >= (last := joined[-1]).end:
            joined.append(each)
            continue
        longer = max(last, each, key=lambda one: (one.end - one.start, one.score))
        joined[-1] = replace(longer, start=last.start, end=max(last.end, each.end))
    return joined


class _Placeholders:
    """Numbers the names of texts, without the placeholders that the texts have already."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._taken = {match for text in texts for match in _PLACEHOLDER.findall(text)}
        self._names: dict[tuple[str, str], str] = {}
        self._numbers: dict[str, Iterator[int]] = {}

    def of(self, label: str, name: str) -> str:
        """Return the placeholder of a name; case and white space make no other name."""
        key = label, " ".join(name.split()).casefold()
        if key not in self._names:
            numbers = self._numbers.setdefault(label, count(1))
            free = (place for n in numbers if (place := f"<{label}_{n}>") not in self._taken)
            self._names[key] = next(free)
        return self._names[key]


def _redacted(text: str, found: Sequence[LabelledSpan], placeholders: _Placeholders) -> Redaction:
    parts: list[str] = []
    replacements: list[Replacement] = []
    position = length = 0
    for each in found:
        before, name = text[position : each.start], text[each.start : each.end]
        placeholder = placeholders.of(each.label, name)
        start = length + len(before)
        length = start + len(placeholder)
        parts += [before, placeholder]
        replacements.append(
            Replacement(
                each.label, placeholder, name, each.start, each.end, start, length, each.score
            )
        )
        position = each.end
    return Redaction("".join([*parts, text[position:]]), replacements)


TASK: Final = Task(
    name="redact",
    route="/redact",
    summary="A text whose entities are replaced by placeholders, and how to undo that",
    heads=(head.HEAD.name,),
    other_heads=(entities_head.HEAD.name,),
    inputs=Annotated[Text | Texts, Field(description="a text, or a list of texts")],
    parameters=RedactParameters,
    result=Redaction | list[Redaction],
    alone=(str,),
    own_parameters=("across_texts", "min_score", "patterns"),
    # A search takes 1 us per character, and each text may follow many labels.
    needs_thread=lambda parameters: bool(parameters.patterns or parameters.labels),
    prepare=prepare,
    decode=decode,
    scores=lambda *_: "probability",
    examples={
        "One text": {"inputs": "Ada Lovelace was born in London."},
        "Texts with the same names": {
            "inputs": ["Ada Lovelace was born.", "Write to Ada Lovelace: ada@example.org"],
            "parameters": {"across_texts": True, "patterns": ["EMAIL"]},
        },
    },
)
