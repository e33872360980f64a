"""Texts to embed, which several tasks share: prompts, token ids, long texts, places of tokens."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from cloze.model_store.batch import Encoding
from cloze.model_store.heads import HeadRequest
from cloze.service.core import EmptyRequest, InvalidRequest, Location
from cloze.service.tasks.long_text import (
    TruncationParameters,
    UsageParameters,
    WindowBudget,
    characters,
)
from cloze.service.tasks.task import (
    NotEmpty,
    TaskContext,
    Text,
    TextUsage,
    TokenIds,
    check_text,
    input_name,
    listed,
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


class EncodedTexts(NamedTuple):
    """The encodings of a request's texts.

    Attributes:
        encodings: one per text, or one per window of each text.
        truncated: number of texts that were cut.
        usage: how much of each text was used; None unless the client asks.
        windows: number of windows of each text; None if no text was to be divided.
    """

    encodings: list[Encoding]
    truncated: int
    usage: list[TextUsage] | None
    windows: list[int] | None


def texts_and_names(inputs: Any, context: TaskContext) -> tuple[list[TextOrIds], list[Location]]:
    """Return the texts of `EmbedInputs`, and the name of each text in errors.

    Raises:
        EmptyRequest: there are no texts.
        InvalidRequest: there are too many texts.
    """
    is_one = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], int))
    texts: list[TextOrIds] = listed([inputs] if is_one else inputs, context.limits)
    return texts, [input_name(index, many=not is_one) for index in range(len(texts))]


def encode(
    texts: Sequence[TextOrIds],
    names: Sequence[Location],
    parameters: TextParameters,
    context: TaskContext,
    request: Mapping[str, HeadRequest],
) -> EncodedTexts:
    """Return the encodings of texts to embed.

    Args:
        texts: at least one text, or its token ids.
        names: name of each text in errors.
        parameters: prompt and truncation.
        context: the model. Without a recipe for embeddings, it has no prompts.
        request: what each encoding asks of the heads.

    Raises:
        EmptyRequest: a text is empty.
        InvalidRequest: an id is outside the vocabulary, the prompt is unknown, or a text is too
            long and long texts are refused; or its windows have more tokens than a request may.
    """
    recipe = context.manifest.embedding
    max_tokens = recipe.max_tokens if recipe else context.limits.max_tokens
    prompt = prompt_of(context, parameters.prompt_name)
    ids = _ids(texts, names, prompt, context)
    if parameters.choice == "window":
        return _divide(texts, names, ids, prompt, max_tokens, parameters, context, request)
    encodings, truncated = [], 0
    for name, text_ids in zip(names, ids, strict=True):
        encoding, cut = context.tokenizer.encode(text_ids, max_tokens, keep_end=parameters.keep_end)
        if cut:
            parameters.check_cut(name, len(text_ids) + 2, max_tokens)
        encoding.requests = request
        encodings.append(encoding)
        truncated += cut
    usage = None
    if parameters.return_usage:
        usage = [
            TextUsage(len(text_ids) + 2, len(encoding))
            for text_ids, encoding in zip(ids, encodings, strict=True)
        ]
    return EncodedTexts(encodings, truncated, usage, None)


def _divide(
    texts: Sequence[TextOrIds],
    names: Sequence[Location],
    ids: Sequence[Sequence[int]],
    prompt: str,
    max_tokens: int,
    parameters: TextParameters,
    context: TaskContext,
    request: Mapping[str, HeadRequest],
) -> EncodedTexts:
    """Return the windows of texts; each window begins with the prompt's tokens. See `encode`."""
    tokenizer, budget = context.tokenizer, WindowBudget(context.limits)
    encodings, counts = [], []
    usage: list[TextUsage] | None = [] if parameters.return_usage else None
    for text, name, text_ids in zip(texts, names, ids, strict=True):
        needs_places = isinstance(text, str) and (prompt or usage is not None)
        places = tokenizer.spans(f"{prompt}{text}").offsets if needs_places else []
        prefix = list(text_ids[: sum(start < len(prompt) for start, _ in places)])
        own = text_ids[len(prefix) :]
        room = max_tokens - 2 - len(prefix)
        if room < 1:
            raise InvalidRequest(
                f"the prompt of {len(prefix)} tokens leaves no room; the model reads {max_tokens}"
            )
        bounds = budget.divide(len(own), room, name) if len(own) > room else [(0, len(own))]
        counts.append(len(bounds))
        for first, end in bounds:
            encoding, _ = tokenizer.encode([*prefix, *own[first:end]], max_tokens)
            encoding.requests = request
            encodings.append(encoding)
        if usage is not None:
            spans = None
            if len(bounds) > 1 and places:
                own_places = places[len(prefix) :]
                spans = [
                    (start - len(prompt), end - len(prompt))
                    for start, end in characters(bounds, own_places)
                ]
            usage.append(TextUsage(len(text_ids) + 2, len(text_ids) + 2, spans))
    return EncodedTexts(encodings, 0, usage, counts)


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
    kept = found[len(found) - (tokens - 2) :] if parameters.keep_end else found[: tokens - 2]
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
            f"prompt_name {ascii(name)[:80]} is not one of the model's prompts ({known})"
        )
    return prompts[name]


def _ids(
    texts: Sequence[TextOrIds], names: Sequence[Location], prompt: str, context: TaskContext
) -> list[list[int]]:
    """Return the ids of each text without ``[CLS]`` and ``[SEP]``."""
    tokenizer = context.tokenizer
    for name, text in zip(names, texts, strict=True):
        if isinstance(text, str):
            check_text(text, name, context.limits)
        elif not text:
            raise EmptyRequest("is empty; it needs at least 1 token id", name)
        elif not (min(text) >= 0 and max(text) < tokenizer.vocab_size):
            known = f"this model's are 0 to {tokenizer.vocab_size - 1}"
            raise InvalidRequest(f"has token ids from {min(text)} to {max(text)}; {known}", name)
    strings = [prompt + text for text in texts if isinstance(text, str)]
    encoded = iter(tokenizer.ids(strings or [""]))
    ids = []
    for text in texts:
        if isinstance(text, str):
            ids.append(next(encoded))
        else:
            ids.append(text[1:-1] if tokenizer.is_wrapped(text) else text)
    return ids
