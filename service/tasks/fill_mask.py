"""Fill-mask: the likeliest tokens at each ``[MASK]``, as transformers' pipeline scores and shapes them.

A score is the softmax over the whole vocabulary. Asked-for targets are then picked out without scaling them anew; a
target that is not one token stands for its first sub-token, with a warning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.core import InvalidRequest, Output, Query
from service.tasks.prepared import Prepared, TaskLimits, check_range, check_text, place
from service.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prediction:
    """One token for one mask."""

    score: float
    token: int
    token_str: str
    sequence: str


_WRITTEN_TOKENS = 4
"""How many tokens may be written in an answer for each that may be run: writing is the cheaper."""

Masks = list[list[Prediction]]
"""Of one text: for each of its masks, predictions, best first."""


def prepare(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    limits: TaskLimits,
    *,
    top_k: int = 5,
    targets: Sequence[str] = (),
    many: bool = False,
) -> Prepared[list[Masks]]:
    """Tokenize texts that each hold at least one mask token.

    Args:
        tokenizer: the model's.
        texts: at least one.
        limits: see `TaskLimits`.
        top_k: predictions a mask.
        targets: tokens to choose among; empty: the whole vocabulary.
        many: whether the request was a list, for the errors' wording.

    Raises:
        InvalidRequest: no mask, too many, one beyond what the model reads, or a parameter out of its limits.
    """
    check_range(top_k, 1, min(limits.max_top_k, tokenizer.vocab_size), "top_k")
    if len(targets) > limits.max_top_k:
        raise InvalidRequest(f"targets has {len(targets)} tokens; the limit is {limits.max_top_k}")
    target_ids, warnings = _target_ids(tokenizer, targets)
    queries, truncated = [], 0
    for index, text in enumerate(texts):
        check_text(text, place(index, many), limits)
    predictions = written = 0
    for index, ids in enumerate(tokenizer.ids(texts)):
        asked = max(top_k, len(target_ids)) * _count_masks(tokenizer, ids, place(index, many), limits)
        predictions += asked
        written += asked * min(len(ids), limits.max_tokens)
        if predictions > limits.max_results:
            raise InvalidRequest(f"the request asks for more than {limits.max_results} predictions (masks x top_k), the limit")
        if written > (most := _WRITTEN_TOKENS * limits.max_request_tokens):
            raise InvalidRequest(f"the predictions' sequences would hold more than {most} tokens, the limit")
        sequence, cut = tokenizer.single(ids, limits.max_tokens)
        truncated += cut
        queries.append(
            Query(
                np.array(sequence, np.int32),
                np.zeros(len(sequence), np.int32),
                masks=[position for position, token in enumerate(sequence) if token == tokenizer.mask_id],
                top_k=0 if target_ids else top_k,
                targets=target_ids,
            )
        )

    def decode(outputs: Sequence[Output]) -> list[Masks]:
        return [_decode(tokenizer, query, output, top_k) for query, output in zip(queries, outputs, strict=True)]

    return Prepared(queries, decode, predictions, truncated, warnings)


def _count_masks(tokenizer: Tokenizer, ids: Sequence[int], name: str, limits: TaskLimits) -> int:
    places = [position for position, token in enumerate(ids) if token == tokenizer.mask_id]
    if not places:
        raise InvalidRequest(f"{name} holds no mask token; put {tokenizer.mask_token} where a word is to be guessed")
    if len(places) > limits.max_masks:
        raise InvalidRequest(f"{name} holds {len(places)} mask tokens; the limit is {limits.max_masks}")
    if (last := places[-1] + 1) > limits.max_tokens - 2:
        raise InvalidRequest(
            f"{name} has a mask token at token {last}, but the model reads only the first {limits.max_tokens - 2} of a text"
        )
    return len(places)


def _target_ids(tokenizer: Tokenizer, targets: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    found: dict[int, None] = {}
    warnings = []
    for target in targets:
        number = tokenizer.id_of(target)
        if number is None:
            pieces = tokenizer.ids([target])[0]
            shown = ascii(target)
            if not pieces:
                warnings.append(f"target {shown} is not in the vocabulary and was left out")
                continue
            number = pieces[0]
            warnings.append(f"target {shown} is not in the vocabulary; {tokenizer.decode([[number]])[0]!a} stands for it")
        found[number] = None
    if targets and not found:
        raise InvalidRequest("none of the targets has a token in the model's vocabulary")
    return list(found), tuple(warnings)


def _decode(tokenizer: Tokenizer, query: Query, output: Output, top_k: int) -> Masks:
    assert output.logsumexp is not None
    assert output.top_logits is not None
    assert output.top_ids is not None
    assert output.target_logits is not None
    sequence = query.input_ids.tolist()
    only_one = len(query.masks) == 1
    masks = []
    for number, position in enumerate(query.masks):
        if query.targets:
            logits = output.target_logits[number]  # [n]
            best = np.argsort(-logits, kind="stable")[:top_k]
            logits, tokens = logits[best], [query.targets[choice] for choice in best]
        else:
            logits, tokens = output.top_logits[number], output.top_ids[number].tolist()  # [k]
        scores = np.exp(logits - output.logsumexp[number]).tolist()
        filled = [[*sequence[:position], token, *sequence[position + 1 :]] for token in tokens]
        # With several masks the others stay visible, hence all special tokens do, as in transformers.
        texts = tokenizer.decode(filled, skip_special_tokens=only_one)
        words = tokenizer.decode([[token] for token in tokens])
        masks.append([Prediction(*fields) for fields in zip(scores, tokens, words, texts, strict=True)])
    return masks
