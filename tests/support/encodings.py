"""Encodings for tests of what handles them: random or constant tokens, and any mix of requests."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cloze.model_store.batch import Encoding
from cloze.model_store.heads import HeadRequest
from cloze.model_store.heads.masked_lm import MaskedLMRequest
from cloze.service.batching.fair_queue import Queue, Submission, Terms


def encoding(
    input_ids: Sequence[int],
    token_type_ids: Sequence[int] | None = None,
    *,
    masks: Sequence[int] = (),
    top_k: int = 0,
    targets: Sequence[int] = (),
    pair: bool = False,
    embed: bool = False,
    span: bool = False,
) -> Encoding:
    """Return an encoding that asks for what is given."""
    requests: dict[str, HeadRequest] = {}
    if masks:
        requests["masked_lm"] = MaskedLMRequest(list(masks), top_k, list(targets))
    if pair:
        requests["next_sentence"] = HeadRequest()
    if embed:
        requests["embedding"] = HeadRequest()
    if span:
        requests["span"] = HeadRequest()
    types = np.zeros(len(input_ids)) if token_type_ids is None else token_type_ids
    return Encoding(np.asarray(input_ids, np.int32), np.asarray(types, np.int32), requests)


def sized(length: int, value: int = 1) -> Encoding:
    """Return an encoding of some length, of one id, that asks for its embedding."""
    return encoding([value] * length, embed=True)


def later(seconds: float = 60.0) -> float:
    """Return a deadline."""
    return time.monotonic() + seconds


def submit(
    queue: Queue, encodings: Sequence[Encoding], deadline: float, **terms: Any
) -> Submission:
    """Submit encodings to a queue on some terms."""
    submission = Submission(Terms(deadline, **terms), encodings)
    queue.submit(submission)
    return submission


def of_tasks(tasks: Sequence[str], sequences: int, length: int) -> list[Encoding]:
    """Return a batch in which every third encoding asks for masks, a pair or an embedding."""
    masked = "fill-mask" in tasks
    return [
        encoding(
            [5] * length,
            masks=[1] if masked and i % 3 == 0 else (),
            top_k=1 if masked and i % 3 == 0 else 0,
            pair="nsp" in tasks and i % 3 == 1,
            embed="embed" in tasks and i % 3 == 2,
            span="qa" in tasks,
        )
        for i in range(sequences)
    ]
