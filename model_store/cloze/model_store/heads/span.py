"""Extractive question answering: a start and an end logit per token.

The result is the logits [S, 2] of a sequence: start, end.

Source: Devlin et al. 2019, section 4.2. The graph always scores all tokens of a batch. The
projection has only two columns, so a gather of the requested rows would cost as much.
"""

from collections.abc import Mapping
from typing import Final

from pydantic import Field

from cloze.model_store.heads.head import ArrayResult, Frozen, Head, Outputs, Requests
from cloze.model_store.layouts import Placement
from cloze.model_store.tensors import TensorSpec

SPAN_LOGITS: Final = TensorSpec(
    "span_logits", "float32", ("T", 2), "start logit and end logit of each token"
)

MAX_THRESHOLD: Final = 1000.0
"""Largest magnitude of a threshold, in logits."""


class SpanOptions(Frozen):
    """The head's section in a manifest.

    Attributes:
        no_answer_threshold: an answer is empty where the two logits of ``[CLS]`` exceed those of
            the best span by more than this sum (Rajpurkar et al. 2018, their evaluation script).
    """

    no_answer_threshold: float = Field(ge=-MAX_THRESHOLD, le=MAX_THRESHOLD)


def no_answer_threshold(heads: Mapping[str, Frozen]) -> float:
    """Return the threshold of a manifest's ``heads``; 0 without a section of this head."""
    options = heads.get(HEAD.name)
    return options.no_answer_threshold if isinstance(options, SpanOptions) else 0.0


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
    options=SpanOptions,
    has_default_options=True,
    per_token=True,
)
