"""Embedding: a text as one vector."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_store.manifest import Embedding
from service.core import Float32, InvalidRequest, Output, Query
from service.tasks.prepared import Prepared, TaskLimits, check_range, check_text, place
from service.tokenizer import Tokenizer

Text = str | list[int]
"""A text, or its token ids in the model's own vocabulary."""


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """What a request may choose.

    Attributes:
        normalize: scale to length 1; None: as the model's recipe says.
        dimensions: keep only the first so many, for models trained to allow it (Kusupati et al. 2022).
        prompt_name: one of the model's prompts, put before each text.
        truncate: None or True: cut and report; False: refuse a text that is too long.
        keep_end: cut a long text's start instead of its end.
    """

    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
    keep_end: bool = False


def prepare(
    tokenizer: Tokenizer,
    texts: Sequence[Text],
    recipe: Embedding,
    options: EmbedOptions,
    limits: TaskLimits,
    *,
    many: bool = False,
) -> Prepared[Float32]:
    """Tokenize texts to embed; the result is [n, D] float32.

    Raises:
        InvalidRequest: an empty text, an id outside the vocabulary, an unknown prompt, or a text that is too long and
            must not be cut.
    """
    dimensions = options.dimensions if options.dimensions is not None else recipe.dimensions
    check_range(dimensions, 1, recipe.dimensions, "dimensions")
    prompt = _prompt(recipe, options.prompt_name)
    queries, truncated = [], 0
    for index, ids in enumerate(_ids(tokenizer, texts, prompt, limits, many)):
        sequence, cut = tokenizer.single(ids, recipe.max_tokens, keep_end=options.keep_end)
        if cut and options.truncate is False:
            raise InvalidRequest(
                f"{place(index, many)} has {len(ids) + 2} tokens; the model reads {recipe.max_tokens}, and truncate is false"
            )
        truncated += cut
        queries.append(Query(np.array(sequence, np.int32), np.zeros(len(sequence), np.int32), embed=True))
    normalize = recipe.normalize if options.normalize is None else options.normalize

    def decode(outputs: Sequence[Output]) -> Float32:
        vectors = np.array([output.embedding for output in outputs if output.embedding is not None])[:, :dimensions]
        if normalize:
            vectors = vectors / np.maximum(np.sqrt(np.einsum("nd,nd->n", vectors, vectors)), 1e-12)[:, None]
        return np.ascontiguousarray(vectors, dtype=np.float32)

    return Prepared(queries, decode, truncated=truncated)


def _prompt(recipe: Embedding, name: str | None) -> str:
    name = name or recipe.default_prompt
    if name is None:
        return ""
    if name not in recipe.prompts:
        known = ", ".join(map(ascii, recipe.prompts)) or "none"
        raise InvalidRequest(f"prompt_name {name!a} is not one of the model's prompts ({known})")
    return recipe.prompts[name]


def _ids(tokenizer: Tokenizer, texts: Sequence[Text], prompt: str, limits: TaskLimits, many: bool) -> list[list[int]]:
    """Ids of each text without ``[CLS]`` and ``[SEP]``."""
    for index, text in enumerate(texts):
        if isinstance(text, str):
            check_text(text, place(index, many), limits)
        elif not text:
            raise InvalidRequest(f"{place(index, many)} is empty; it needs at least 1 token id")
        elif not (min(text) >= 0 and max(text) < tokenizer.vocab_size):
            known = f"this model's are 0 to {tokenizer.vocab_size - 1}"
            raise InvalidRequest(f"{place(index, many)} has token ids from {min(text)} to {max(text)}; {known}")
    encoded = iter(tokenizer.ids([prompt + text for text in texts if isinstance(text, str)] or [""]))
    return [next(encoded) if isinstance(text, str) else text[1:-1] if tokenizer.is_wrapped(text) else text for text in texts]
