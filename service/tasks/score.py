"""Score: how likely a text is to a model that fills masks.

The log-probability of a token is the logarithm of its probability at a mask in its place, given all
other tokens of the text. The sum over the tokens is the text's pseudo-log-likelihood. A text of n
tokens becomes n encodings, which share batches with those of other requests.

Source: Salazar et al. 2020, "Masked Language Model Scoring", equation 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import masked_lm
from cloze.model_store.heads.masked_lm import MaskedLMRequest
from cloze.service.core import InvalidRequest
from cloze.service.tasks.task import (
    Example,
    NoParameters,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    Text,
    Texts,
    check_results,
    check_text,
    input_name,
    listed,
)
from cloze.service.tokenizer import Spans, Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, ``text[start:end]`` in characters, and the logarithm of its probability.

    The surprisal of the token, in nats, is ``-log_probability``.
    """

    token: str
    start: int
    end: int
    log_probability: float


@dataclass(frozen=True, slots=True)
class TextScore:
    """The pseudo-log-likelihood of a text, which is the sum over its tokens."""

    score: float
    tokens: list[ScoredToken]


@dataclass(frozen=True, slots=True)
class _State:
    texts: list[Spans]
    many: bool


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[_State]:
    """Tokenize the texts, and mask each token of a text in a copy of its own.

    Raises:
        EmptyRequest: there is no text, or a text is empty.
        InvalidRequest: a text has no token, a mask token, or more tokens than the model reads; or
            all copies have more tokens than a request may have.
    """
    texts, many = listed(call.inputs, context.limits), isinstance(call.inputs, list)
    for index, text in enumerate(texts):
        check_text(text, input_name(index, many=many), context.limits)
    spans: list[Spans] = []
    tokens = 0
    for index, text in enumerate(texts):
        spans.append(context.tokenizer.spans(text))
        name, length = input_name(index, many=many), len(spans[-1].ids)
        _check(spans[-1].ids, name, context)
        tokens += length * (length + 2)
        if tokens > (most := context.limits.max_request_tokens):
            raise InvalidRequest(
                f"up to {name} the masked copies hold {tokens} tokens; the limit of a request is "
                f"{most}"
            )
    check_results(sum(len(text.ids) for text in spans), "the texts need", context.limits)
    encodings = [copy for text in spans for copy in _masked_copies(text.ids, context.tokenizer)]
    return PreparedRequest(encodings, _State(spans, many), results=len(encodings))


def _check(ids: Sequence[int], name: str, context: TaskContext) -> None:
    """Check the tokens of one text."""
    tokenizer, most = context.tokenizer, context.limits.max_tokens
    if not ids:
        raise InvalidRequest(f"{name} has no token, only spaces or control characters")
    if len(ids) + 2 > most:
        raise InvalidRequest(f"{name} has {len(ids) + 2} tokens; the model reads {most}")
    if tokenizer.mask_id in ids:
        raise InvalidRequest(
            f"{name} holds {tokenizer.mask_token}, which has no probability; /fill-mask fills it"
        )


def _masked_copies(ids: Sequence[int], tokenizer: Tokenizer) -> list[Encoding]:
    """Return an encoding per token, in which a mask replaces the token."""
    assert tokenizer.mask_id is not None  # a model with the head has the token
    whole, _ = tokenizer.encode(ids, len(ids) + 2)
    copies = []
    for position, token in enumerate(ids, start=1):
        input_ids = whole.input_ids.copy()
        input_ids[position] = tokenizer.mask_id
        requests = {masked_lm.HEAD.name: MaskedLMRequest([position], targets=[token])}
        copies.append(Encoding(input_ids, whole.token_type_ids, requests))
    return copies


def decode(
    prepared: PreparedRequest[_State], outputs: Sequence[HeadOutputs], context: TaskContext
) -> TextScore | list[TextScore]:
    """Return the score of one text, or a list of scores if the inputs are a list."""
    results = iter(output[masked_lm.HEAD.name] for output in outputs)
    scores = []
    for text in prepared.state.texts:
        tokens = [
            ScoredToken(
                context.tokenizer.token_of(token), start, end, result.target_log_probability()
            )
            for token, (start, end), result in zip(text.ids, text.offsets, results, strict=False)
        ]
        scores.append(TextScore(math.fsum(token.log_probability for token in tokens), tokens))
    return scores if prepared.state.many else scores[0]


TASK: Final = Task(
    name="score",
    route="/score",
    summary="How likely a text is, and each of its tokens",
    heads=(masked_lm.HEAD.name,),
    inputs=Annotated[
        Text | Texts,
        Field(
            description="a text, or a list of texts", examples=["Paris is the capital of France."]
        ),
    ],
    parameters=NoParameters,
    result=TextScore | list[TextScore],
    prepare=prepare,
    decode=decode,
    takes_long=lambda _: True,
    examples=(
        Example("One text", {"inputs": "Paris is the capital of France."}),
        Example("Two texts to compare", {"inputs": ["He opened the door.", "He opened the sky."]}),
    ),
)
