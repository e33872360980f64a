"""Next sentence prediction: the probability that a text follows another text.

Source: Devlin et al. 2019, section 3.1, task 2.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field

from cloze.model_store.heads import HeadRequest, next_sentence
from cloze.service.errors import Location
from cloze.service.tasks.task import INPUTS, Outputs, PreparedRequest, Task, TaskContext, softmax
from cloze.service.tasks.texts import LongTextRule, UsageParameters, encode_pairs
from cloze.service.tasks.wire import NotEmpty, Text, Texts, WireModel


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


Inputs = Pair | Candidates | Annotated[list[Pair], NotEmpty]

_REQUEST: Final = {next_sentence.HEAD.name: HeadRequest()}


class NspParameters(UsageParameters):
    """What to do with a pair that is too long for the model."""

    long_text: Literal["error", "truncate"] | None = None
    """error refuses a long pair; truncate, the default, cuts its longer text"""


def prepare(
    inputs: Inputs, parameters: NspParameters, context: TaskContext
) -> PreparedRequest[Inputs]:
    """Tokenize the pairs; raise `InvalidRequest` for a long one if long pairs are refused."""
    limits = context.limits
    pairs: list[tuple[Location, str, str | None]]
    if isinstance(inputs, Candidates):
        limits.checked(inputs.text, INPUTS.below("text"))
        candidates = limits.checked(inputs.candidates, INPUTS.below("candidates"))
        pairs = [(at, inputs.text, text) for at, text in candidates]
    else:
        pairs = [(at, pair.text, pair.next) for at, pair in limits.checked(inputs)]
        for at, first, second in pairs:
            limits.checked(first, at.below("text"))
            limits.checked(second, at.below("next"))
    rule = LongTextRule(parameters.long_text or "truncate", report=parameters.return_usage)
    prepared = encode_pairs(pairs, rule, context, _REQUEST).prepared(inputs)
    return prepared._replace(texts=len(pairs) + isinstance(inputs, Candidates))


def decode(
    inputs: Inputs, outputs: Outputs, _: TaskContext
) -> list[list[NspLabel]] | list[RankedCandidate]:
    """Return the labels of each pair, or the candidates, likeliest first."""
    logits = np.stack([output[next_sentence.HEAD.name].array for output in outputs])
    scores = softmax(logits).tolist()
    if isinstance(inputs, Candidates):
        order = sorted(range(len(scores)), key=lambda index: -scores[index][0])
        return [RankedCandidate(i, scores[i][0], inputs.candidates[i]) for i in order]
    return [[NspLabel("IsNext", is_next), NspLabel("NotNext", other)] for is_next, other in scores]


TASK: Final = Task(
    name="nsp",
    route="/nsp",
    summary="Whether one text follows another",
    heads=(next_sentence.HEAD.name,),
    inputs=Annotated[Inputs, Field(description="a pair, a list of them, or a text and candidates")],
    parameters=NspParameters,
    result=list[NspLabel] | list[list[NspLabel]] | list[RankedCandidate],
    alone=(Pair,),
    own_fields=("next", "candidates"),
    prepare=prepare,
    decode=decode,
    scores=lambda *_: "probability",
    labels=lambda *_: ("IsNext", "NotNext"),
    examples={
        "A pair": {"inputs": {"text": "He opened the door.", "next": "He went in."}},
        "Candidates to rank": {
            "inputs": {"text": "He opened the door.", "candidates": ["He went in.", "Cats purr."]}
        },
    },
)
