"""Extractive question answering: a start and an end logit per token.

Source: Devlin et al. 2019, section 4.2. The graph always scores all tokens of a batch. The
projection has only two columns, so a gather of the requested rows would cost as much.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.heads.head import GraphSpec, Head, HeadRequest, Outputs, Requests
from cloze.model_store.layouts import Feeds, Placement
from cloze.model_store.tensors import TensorSpec

SPAN_LOGITS: Final = TensorSpec(
    "span_logits", "float32", ("T", 2), "start logit and end logit of each token"
)


@dataclass(frozen=True, slots=True)
class SpanRequest(HeadRequest):
    """Score every token of a sequence as the start and as the end of an answer."""


@dataclass(frozen=True, slots=True)
class SpanResult:
    """The logits [S, 2] float32 of one sequence: start, end."""

    logits: NDArray[np.float32]


def _pack(_: Requests, __: Placement, ___: GraphSpec) -> Feeds:
    return {}


def _unpack(requests: Requests, placement: Placement, outputs: Outputs) -> list[SpanResult | None]:
    logits, starts = outputs[SPAN_LOGITS.name], placement.starts.tolist()
    return [
        None if request is None else SpanResult(logits[starts[i] : starts[i + 1]])
        for i, request in enumerate(requests)
    ]


HEAD: Final = Head(
    name="span",
    task="qa",
    inputs=(),
    outputs=(SPAN_LOGITS,),
    request=SpanRequest,
    result=SpanResult,
    pack=_pack,
    unpack=_unpack,
    largest_request=lambda _: SpanRequest(),
)
