"""Score: how likely a text is to a model that fills masks.

The log-probability of a token is the logarithm of its probability at a mask in its place, given all
other tokens of the text. The sum over the tokens is the text's pseudo-log-likelihood. A text of n
tokens becomes n encodings, which share batches with those of other requests.

Source: Salazar et al. 2020, "Masked Language Model Scoring", equation 1.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field

from cloze.model_store.batch import Encoding
from cloze.model_store.heads import masked_lm
from cloze.model_store.sequences import TEXT_TOKENS
from cloze.service.errors import InvalidRequest
from cloze.service.tasks.task import Outputs, PreparedRequest, Task, TaskContext, check_has_tokens
from cloze.service.tasks.texts import LongText, LongTextRule, TextEncoder, UsageParameters, centred
from cloze.service.tasks.wire import Text, Texts
from cloze.service.text.tokenizer import Spans


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


class ScoreParameters(UsageParameters):
    """What to do with a text that is too long for the model."""

    long_text: LongText | None = Field(
        None,
        description="error refuses a long text, truncate scores only its first tokens, window "
        "scores each token in the part of the text around it; the default is error",
    )


def prepare(
    inputs: Any, parameters: ScoreParameters, context: TaskContext
) -> PreparedRequest[list[Spans]]:
    """Tokenize the texts, and mask each token of a text in a copy of its own."""
    tokenizer, limits = context.tokenizer, context.limits
    choice = parameters.long_text or "error"
    rule = LongTextRule(choice, side="right", report=parameters.return_usage)
    encoder = TextEncoder(rule, context, limits.max_tokens)
    texts, held = [], 0
    for at, text in limits.checked(inputs):
        spans = tokenizer.spans(text)
        check_has_tokens(spans.ids, at)
        tokens = len(spans.ids) + TEXT_TOKENS
        if tokenizer.mask_id in spans.ids:
            mask = tokenizer.mask_token
            raise InvalidRequest(f"holds {mask}, which has no probability; /fill-mask fills it", at)
        if choice != "window":
            [(_, end)] = encoder.divide(at, len(spans.ids))
            spans = spans.part(0, end)
        read = len(spans.ids) + TEXT_TOKENS
        encoder.keep([], tokens, read)
        texts.append(spans)
        held += len(spans.ids) * min(read, limits.max_tokens)
        limits.check_tokens(held, "the masked copies hold", at)
    limits.check_results(sum(len(spans.ids) for spans in texts), "the texts need")
    copies = [copy for spans in texts for copy in _masked_copies(spans.ids, context)]
    return encoder.prepared(texts)._replace(encodings=copies)


def _masked_copies(ids: Sequence[int], context: TaskContext) -> Iterator[Encoding]:
    """Yield an encoding per token, in which a mask replaces the token.

    The encoding of a long text is the part that has the token in its middle.
    """
    tokenizer, room = context.tokenizer, context.limits.max_tokens - TEXT_TOKENS
    assert tokenizer.mask_id is not None  # a model with the head has the token
    for position, token in enumerate(ids):
        first, end = centred(position, len(ids), room)
        part = tokenizer.encode(ids[first:end])
        masked = position - first + 1  # after [CLS]
        part.input_ids[masked] = tokenizer.mask_id
        part.requests = {masked_lm.HEAD.name: masked_lm.MaskedLMRequest([masked], targets=[token])}
        yield part


def decode(texts: list[Spans], outputs: Outputs, context: TaskContext) -> list[TextScore]:
    """Return the score of each text."""
    results = iter(output[masked_lm.HEAD.name] for output in outputs)
    scores, token_of = [], context.tokenizer.token_of
    for text in texts:
        tokens = [
            ScoredToken(token_of(token), start, end, result.target_log_probability())
            for token, (start, end), result in zip(text.ids, text.offsets(), results, strict=False)
        ]
        scores.append(TextScore(math.fsum(token.log_probability for token in tokens), tokens))
    return scores


TASK: Final = Task(
    name="score",
    route="/score",
    summary="How likely a text is, and each of its tokens",
    heads=(masked_lm.HEAD.name,),
    inputs=Annotated[Text | Texts, Field(description="a text, or a list of texts")],
    parameters=ScoreParameters,
    result=TextScore | list[TextScore],
    prepare=prepare,
    decode=decode,
    alone=(str,),
    needs_thread=lambda _: True,
    scores=lambda *_: "log-probability",
    examples={
        "One text": {"inputs": "Paris is the capital of France."},
        "Two texts to compare": {"inputs": ["He opened the door.", "He opened the sky."]},
    },
)
