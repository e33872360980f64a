"""Extractive question answering: a start and an end logit per token.

The result is the logits [S, 2] of a sequence: start, end.

Source: Devlin et al. 2019, section 4.2. The graph always scores all tokens of a batch. The
projection has only two columns, so a gather of the requested rows would cost as much.
"""

from typing import Final

from cloze.model_store.heads.head import ArrayResult, Head, Outputs, Requests
from cloze.model_store.layouts import Placement
from cloze.model_store.tensors import TensorSpec

SPAN_LOGITS: Final = TensorSpec(
    "span_logits", "float32", ("T", 2), "start logit and end logit of each token"
)


def _unpack(requests: Requests, placement: Placement, outputs: Outputs) -> list[ArrayResult | None]:
    logits, starts = outputs[SPAN_LOGITS.name], placement.starts.tolist()
    return [
        None if request is None else ArrayResult(logits[starts[i] : starts[i + 1]])
        for i, request in enumerate(requests)
    ]


HEAD: Final = Head(
    name="span",
    task="qa",
    inputs=(),
    outputs=(SPAN_LOGITS,),
    pack=lambda *_: {},
    unpack=_unpack,
    per_token=True,
)
