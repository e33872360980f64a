"""Token classification: one logit per label for every token of a sequence.

The result is the logits [S, L] of a sequence.

Source: Devlin et al. 2019, section 5.3 (named-entity recognition).
"""

from collections.abc import Mapping
from typing import Any, Final

from cloze.model_store.heads.head import Head, ModelSizes
from cloze.model_store.heads.label_sets import LabelSet, LabelSets, read_labels
from cloze.model_store.heads.rows import per_token
from cloze.model_store.tensors import TensorSpec

TOKEN_ROWS: Final = TensorSpec(
    "token_rows", "int32", ("R",), "the rows of `hidden` to classify: all rows of a sequence"
)
TOKEN_LOGITS: Final = TensorSpec(
    "token_logits", "float32", ("R", "L"), "one logit for each of the model's L labels"
)


class TokenLabels(LabelSets):
    """The head's section in a manifest. Labels are, for example, ``O``, ``B-PER``, ``I-PER``."""

    further: tuple[LabelSet, ...] = ()


def read_options(settings: Mapping[str, Any]) -> TokenLabels:
    """Return the labels of a ``config.json``; see `read_labels`."""
    return TokenLabels(labels=read_labels(settings))


def _model_sizes(sizes: ModelSizes) -> dict[str, int]:
    options = sizes.options[HEAD.name]
    assert isinstance(options, TokenLabels)
    return {"L": options.logits}


HEAD: Final = Head(
    "token_classification",
    "token-classification",
    (TOKEN_ROWS,),
    (TOKEN_LOGITS,),
    *per_token(TOKEN_ROWS, TOKEN_LOGITS),
    options=TokenLabels,
    model_sizes=_model_sizes,
)
