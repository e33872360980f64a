"""Next sentence prediction: the probability that a text follows another text.

Source: Devlin et al. 2019, section 3.1, task 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field

from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import next_sentence
from cloze.service.tasks.long_text import UsageParameters, too_long
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
    TextUsage,
    WireModel,
    check_text,
    input_name,
    listed,
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
        candidates: list[str] = listed(inputs.candidates, limits)
        pairs = [(inputs.text, candidate) for candidate in candidates]
        names = [INPUTS.below("candidates", index) for index in range(len(pairs))]
    else:
        pairs = [(pair.text, pair.next) for pair in listed(inputs, limits)]
        many = isinstance(inputs, list)
        names = [input_name(index, many=many) for index in range(len(pairs))]
    for (first, second), name in zip(pairs, names, strict=True):
        check_text(first, name.below("text"), limits)
        check_text(second, name.below("next"), limits)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # each is tokenized once
    ids = dict(zip(texts, tokenizer.ids(texts), strict=True))
    encodings, usage, truncated = [], [], 0
    for (first, second), name in zip(pairs, names, strict=True):
        encoding, cut = tokenizer.pair(ids[first], ids[second], limits.max_tokens)
        tokens = len(ids[first]) + len(ids[second]) + tokenizer.special.pair_tokens
        if cut and parameters.long_text == "error":
            raise too_long(name, tokens, limits.max_tokens, "long_text is error")
        encoding.requests = _REQUEST
        encodings.append(encoding)
        usage.append(TextUsage(tokens, len(encoding)))
        truncated += cut
    return PreparedRequest(
        encodings,
        inputs,
        truncated=truncated,
        usage=usage if parameters.return_usage else None,
        texts=len(pairs) + isinstance(inputs, Candidates),
    )


_REQUEST: Final = {next_sentence.HEAD.name: next_sentence.NextSentenceRequest()}


def decode(
    prepared: PreparedRequest[Inputs], outputs: Sequence[HeadOutputs], _: TaskContext
) -> list[NspLabel] | list[list[NspLabel]] | list[RankedCandidate]:
    """Return the labels of a pair, of each pair of a list, or the candidates, likeliest first."""
    logits = np.stack([output[next_sentence.HEAD.name].logits for output in outputs])
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    scores = (exponentials / exponentials.sum(1, keepdims=True)).tolist()
    inputs = prepared.state
    if isinstance(inputs, Candidates):
        order = sorted(range(len(scores)), key=lambda index: -scores[index][0])
        return [RankedCandidate(i, scores[i][0], inputs.candidates[i]) for i in order]
    labels = [
        [NspLabel("IsNext", is_next), NspLabel("NotNext", other)] for is_next, other in scores
    ]
    return labels if isinstance(inputs, list) else labels[0]


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
