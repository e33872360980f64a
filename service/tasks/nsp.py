"""Next sentence prediction: the probability that a text follows another text.

Source: Devlin et al. 2019, section 3.1, task 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field

from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import HeadRequest, next_sentence
from cloze.service.tasks.long_text import LongTextRule, TextEncoder, UsageParameters
from cloze.service.tasks.task import (
    INPUTS,
    Example,
    NotEmpty,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    Text,
    Texts,
    WireModel,
    check_text,
    listed,
    softmax,
)


class Pair(WireModel):
    """Two texts. The task predicts whether ``next`` follows ``text``."""

    text: Text
    next: Text


class Candidates(WireModel):
    """A text, and candidates for the next text to rank."""

    text: Text
    candidates: Texts


@dataclass(frozen=True, slots=True)
class NspLabel:
    """A label of a pair and its probability."""

    label: Literal["IsNext", "NotNext"]
    score: float


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """A candidate, its index in the request, and the probability that the candidate follows."""

    index: int
    score: float
    text: str


Inputs = Pair | Candidates | list[Pair]


class NspParameters(UsageParameters):
    """What to do with a pair that is too long for the model."""

    long_text: Literal["error", "truncate"] | None = Field(
        None,
        description="error refuses a long pair, truncate cuts its longer text; the default is "
        "truncate",
    )


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[Inputs]:
    """Tokenize the pairs.

    Raises:
        EmptyRequest: a text is empty.
        InvalidRequest: a pair is too long, and long pairs are refused.
    """
    inputs, tokenizer, limits = call.inputs, context.tokenizer, context.limits
    parameters: NspParameters = call.parameters
    if isinstance(inputs, Candidates):
        pairs = [
            (INPUTS.below("candidates", index), inputs.text, candidate)
            for index, (_, candidate) in enumerate(listed(inputs.candidates, limits))
        ]
    else:
        pairs = [(at, pair.text, pair.next) for at, pair in listed(inputs, limits)]
    for at, first, second in pairs:
        check_text(first, at.below("text"), limits)
        check_text(second, at.below("next"), limits)
    texts = list(dict.fromkeys(text for _, *pair in pairs for text in pair))  # each once
    ids = dict(zip(texts, tokenizer.ids(texts), strict=True))
    rule = LongTextRule(parameters.long_text or "truncate", report=bool(parameters.return_usage))
    encoder = TextEncoder(rule, context, _REQUEST)
    for at, first, second in pairs:
        encoder.add_pair(at, ids[first], ids[second])
    prepared = encoder.prepared(inputs)
    return prepared._replace(texts=len(pairs) + isinstance(inputs, Candidates))


_REQUEST: Final = {next_sentence.HEAD.name: HeadRequest()}


def decode(
    prepared: PreparedRequest[Inputs], outputs: Sequence[HeadOutputs], _: TaskContext
) -> list[list[NspLabel]] | list[RankedCandidate]:
    """Return the labels of each pair, or the candidates, likeliest first."""
    logits = np.stack([output[next_sentence.HEAD.name].array for output in outputs])
    scores = softmax(logits).tolist()
    inputs = prepared.state
    if isinstance(inputs, Candidates):
        order = sorted(range(len(scores)), key=lambda index: -scores[index][0])
        return [RankedCandidate(i, scores[i][0], inputs.candidates[i]) for i in order]
    return [[NspLabel("IsNext", is_next), NspLabel("NotNext", other)] for is_next, other in scores]


TASK: Final = Task(
    name="nsp",
    route="/nsp",
    summary="Whether one text follows another",
    heads=(next_sentence.HEAD.name,),
    inputs=Annotated[
        Pair | Candidates | Annotated[list[Pair], NotEmpty],
        Field(
            description="a pair, a list of pairs, or a text with candidates to rank",
            examples=[{"text": "He opened the door.", "next": "Then he went in."}],
        ),
    ],
    parameters=NspParameters,
    result=list[NspLabel] | list[list[NspLabel]] | list[RankedCandidate],
    alone=(Pair,),
    own_fields=("next", "candidates"),
    prepare=prepare,
    decode=decode,
    examples=(
        Example("A pair", {"inputs": {"text": "He opened the door.", "next": "He went in."}}),
        Example(
            "Candidates to rank",
            {
                "inputs": {
                    "text": "He opened the door.",
                    "candidates": ["He went in.", "Cats purr."],
                }
            },
        ),
    ),
)
