"""Texts to embed, which several tasks share: prompts, token ids, long texts, places of tokens."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from cloze.model_store.heads import HeadRequest
from cloze.service.core import EmptyRequest, InvalidRequest, Location
from cloze.service.tasks.long_text import (
    TextEncoder,
    TruncationParameters,
    UsageParameters,
)
from cloze.service.tasks.task import (
    Input,
    NotEmpty,
    TaskContext,
    Text,
    TokenIds,
    check_text,
)

TextOrIds = str | list[int]
"""A text, or the token ids of a text in the model's vocabulary."""

EmbedInputs = Text | TokenIds | Annotated[list[Text | TokenIds], NotEmpty]

Inputs = Annotated[
    EmbedInputs,
    Field(
        description="a text, its token ids, or a list of either",
        examples=["What is deep learning?"],
    ),
]

Offsets = list[tuple[int, int] | None]
"""(start, end) of each token in characters of its text; None for special tokens and a prompt's."""


class TextParameters(TruncationParameters, UsageParameters):
    """How a text becomes a sequence: the fields of text-embeddings-inference, and our own."""

    prompt_name: str | None = Field(
        None, description="name of a prompt of the model, which is put before each text"
    )


def encode(
    texts: Sequence[Input[TextOrIds]],
    parameters: TextParameters,
    context: TaskContext,
    request: Mapping[str, HeadRequest] | None,
) -> TextEncoder:
    """Return the encodings of texts to embed.

    Args:
        texts: at least one text, or its token ids.
        parameters: prompt and truncation.
        context: the model. Without a recipe for embeddings, it has no prompts.
        request: what each encoding asks of the heads; None: the caller says so itself.

    Raises:
        EmptyRequest: a text is empty.
        InvalidRequest: an id is outside the vocabulary, the prompt is unknown, or a text is too
            long and long texts are refused; or its windows have more tokens than a request may.
    """
    recipe = context.manifest.embedding
    max_tokens = recipe.max_tokens if recipe else context.limits.max_tokens
    prompt = prompt_of(context, parameters.prompt_name)
    ids = _ids(texts, prompt, context)
    rule = parameters.rule(report=parameters.return_usage)
    encoder = TextEncoder(rule, context, request, max_tokens)
    for (at, text), text_ids in zip(texts, ids, strict=True):
        encoder.add(at, text_ids, prompt + text if isinstance(text, str) else None, prompt)
    return encoder


def offsets(text: str, tokens: int, parameters: TextParameters, context: TaskContext) -> Offsets:
    """Return the place of each token of a text's encoding.

    Args:
        text: the text.
        tokens: length of the encoding, special tokens included.
        parameters: the prompt and the truncation of the encoding.
        context: the model.
    """
    prompt = prompt_of(context, parameters.prompt_name)
    found = context.tokenizer.spans(prompt + text).offsets
    first = len(found) - (tokens - 2) if parameters.rule().keep_end else 0
    kept = found[first : first + tokens - 2]
    skipped = len(prompt)
    places = [(start - skipped, end - skipped) if start >= skipped else None for start, end in kept]
    return [None, *places, None]


def prompt_of(context: TaskContext, name: str | None) -> str:
    """Return the prompt to put before each text: the named one, or the model's default.

    Raises:
        InvalidRequest: the model has no prompt of that name.
    """
    recipe = context.manifest.embedding
    prompts = recipe.prompts if recipe else {}
    name = name or (recipe.default_prompt if recipe else None)
    if name is None:
        return ""
    if name not in prompts:
        known = ", ".join(map(ascii, prompts)) or "none"
        raise InvalidRequest(
            f"{ascii(name)[:80]} is not one of the model's prompts ({known})",
            Location(("prompt_name",)),
        )
    return prompts[name]


def _ids(texts: Sequence[Input[TextOrIds]], prompt: str, context: TaskContext) -> list[list[int]]:
    """Return the ids of each text without ``[CLS]`` and ``[SEP]``."""
    tokenizer = context.tokenizer
    for at, text in texts:
        if isinstance(text, str):
            check_text(text, at, context.limits)
        elif not text:
            raise EmptyRequest("is empty; it needs at least 1 token id", at)
        elif not (min(text) >= 0 and max(text) < tokenizer.vocab_size):
            known = f"this model's are 0 to {tokenizer.vocab_size - 1}"
            raise InvalidRequest(f"has token ids from {min(text)} to {max(text)}; {known}", at)
    strings = [prompt + text for _, text in texts if isinstance(text, str)]
    encoded = iter(tokenizer.ids(strings or [""]))
    ids = []
    for _, text in texts:
        if isinstance(text, str):
            ids.append(next(encoded))
        else:
            ids.append(text[1:-1] if tokenizer.is_wrapped(text) else text)
    return ids
