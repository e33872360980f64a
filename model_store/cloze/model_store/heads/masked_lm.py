"""Masked language modelling: the likeliest tokens and the logits of requested tokens per mask.

Source: Devlin et al. 2019, section 3.1, task 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.heads.head import GraphSpec, Head, HeadRequest, Outputs
from cloze.model_store.layouts import Feeds, Placement
from cloze.model_store.tensors import TensorSpec

MASK_ROWS: Final = TensorSpec("mask_rows", "int32", ("M",), "the rows of `hidden` to predict")
TOP_K: Final = TensorSpec("top_k", "int64", (1,), "K, the number of predictions per mask")
TARGET_MASKS: Final = TensorSpec(
    "target_masks", "int32", ("N",), "index into `mask_rows` of each requested logit"
)
TARGET_IDS: Final = TensorSpec(
    "target_ids", "int32", ("N",), "vocabulary id of each requested logit"
)
TOP_LOGITS: Final = TensorSpec(
    "top_logits", "float32", ("M", "K"), "the largest logits, in descending order"
)
TOP_IDS: Final = TensorSpec("top_ids", "int64", ("M", "K"), "vocabulary ids of `top_logits`")
LOGSUMEXP: Final = TensorSpec(
    "logsumexp",
    "float32",
    ("M",),
    "log-sum-exp of all logits of each mask",
)
TARGET_LOGITS: Final = TensorSpec("target_logits", "float32", ("N",), "the requested logits")

_EMPTY = np.zeros(0, np.int32)
_NO_MASKS: Feeds = {
    MASK_ROWS.name: _EMPTY,
    TOP_K.name: np.ones(1, np.int64),
    TARGET_MASKS.name: _EMPTY,
    TARGET_IDS.name: _EMPTY,
}


@dataclass(frozen=True, slots=True)
class MaskedLMRequest(HeadRequest):
    """Predict some tokens of a sequence.

    Attributes:
        positions: positions in the sequence of the tokens to predict; at least one.
        top_k: number of predictions per position.
        targets: vocabulary ids whose logits are requested at every position.
    """

    positions: Sequence[int]
    top_k: int = 0
    targets: Sequence[int] = ()

    @property
    def vocabulary_rows(self) -> int:  # type: ignore[override]  # a property stands for the constant
        """Number of positions to predict."""
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class MaskedLMResult:
    """The predictions of m positions.

    Attributes:
        top_logits: [m, k] float32, the largest logits in descending order.
        top_ids: [m, k] int64, the vocabulary ids of ``top_logits``.
        logsumexp: [m] float32, log-sum-exp of the logits over the vocabulary; the probability of
            a token is ``exp(logit - logsumexp)``.
        target_logits: [m, n] float32, the logits of the request's n targets.
    """

    top_logits: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    logsumexp: NDArray[np.float32]
    target_logits: NDArray[np.float32]

    def top_log_probabilities(self, mask: int) -> NDArray[np.float32]:
        """Return the logarithms [k] of the probabilities of the likeliest tokens of a mask."""
        log_probabilities: NDArray[np.float32] = self.top_logits[mask] - self.logsumexp[mask]
        return log_probabilities

    def target_log_probability(self) -> float:
        """Return the logarithm of the probability of the first target at the first position."""
        return float(self.target_logits[0, 0]) - float(self.logsumexp[0])


def _pack(requests: Sequence[MaskedLMRequest | None], placement: Placement, _: GraphSpec) -> Feeds:
    asked = [(i, request) for i, request in enumerate(requests) if request is not None]
    if not asked:
        return _NO_MASKS
    counts = np.array([len(request.positions) for _, request in asked])
    firsts = np.cumsum(counts) - counts  # index into mask_rows of each request's first mask
    masks = [
        np.repeat(np.arange(first, first + count, dtype=np.int32), len(request.targets))
        for first, count, (_, request) in zip(firsts, counts, asked, strict=True)
    ]
    targets = [
        np.tile(np.array(request.targets, np.int32), len(request.positions)) for _, request in asked
    ]
    return {
        MASK_ROWS.name: np.concatenate(
            [placement.starts[i] + np.array(request.positions, np.int32) for i, request in asked]
        ),
        TOP_K.name: np.array([max(1, *(request.top_k for _, request in asked))], np.int64),
        TARGET_MASKS.name: np.concatenate(masks),
        TARGET_IDS.name: np.concatenate(targets),
    }


def _unpack(
    requests: Sequence[MaskedLMRequest | None], _: Placement, outputs: Outputs
) -> list[MaskedLMResult | None]:
    results: list[MaskedLMResult | None] = []
    mask = target = 0
    for request in requests:
        if request is None:
            results.append(None)
            continue
        count = len(request.positions)
        masks = slice(mask, mask + count)
        wanted = count * len(request.targets)
        logits = outputs[TARGET_LOGITS.name][target : target + wanted]
        results.append(
            MaskedLMResult(
                outputs[TOP_LOGITS.name][masks, : request.top_k],
                outputs[TOP_IDS.name][masks, : request.top_k],
                outputs[LOGSUMEXP.name][masks],
                logits.reshape(count, len(request.targets)),
            )
        )
        mask, target = mask + count, target + wanted
    return results


HEAD: Final = Head(
    name="masked_lm",
    task="fill-mask",
    inputs=(MASK_ROWS, TOP_K, TARGET_MASKS, TARGET_IDS),
    outputs=(TOP_LOGITS, TOP_IDS, LOGSUMEXP, TARGET_LOGITS),
    request=MaskedLMRequest,
    result=MaskedLMResult,
    pack=_pack,
    unpack=_unpack,
    ranked={TOP_IDS.name: TOP_LOGITS.name},
    largest_request=lambda rows: MaskedLMRequest([0] * rows, top_k=5),
    rows=lambda asked: len(asked.positions) * max(asked.top_k, len(asked.targets)),
)
