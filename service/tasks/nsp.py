"""Next sentence: does the second text follow the first (Devlin et al. 2019, section 3.1, task 2)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from service.core import Float32, Output
from service.tasks.prepared import Prepared, TaskLimits, check_text
from service.tokenizer import Tokenizer


def prepare(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], names: Sequence[str], limits: TaskLimits
) -> Prepared[Float32]:
    """Tokenize pairs; the result is [n, 2] float32: the probability that the second is next, and that it is not.

    Args:
        tokenizer: the model's.
        pairs: (text, next), at least one.
        names: how errors name each pair.
        limits: see `TaskLimits`.

    Raises:
        InvalidRequest: an empty text.
    """
    for (first, second), name in zip(pairs, names, strict=True):
        check_text(first, f"{name}.text", limits)
        check_text(second, f"{name}.next", limits)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # candidates share their first text
    ids = dict(zip(texts, tokenizer.ids(texts), strict=True))
    queries, truncated = [], 0
    for first, second in pairs:
        query, cut = tokenizer.pair(ids[first], ids[second], limits.max_tokens)
        queries.append(replace(query, pair=True))
        truncated += cut
    return Prepared(queries, _decode, truncated=truncated)


def _decode(outputs: Sequence[Output]) -> Float32:
    logits = np.stack([output.pair_logits for output in outputs if output.pair_logits is not None])
    scores = np.exp(logits - logits.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)  # type: ignore[no-any-return]
