"""Token classification: one logit per label for every token of a sequence.

The result is the logits [S, L] of a sequence.

Source: Devlin et al. 2019, section 5.3 (named-entity recognition).
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
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


_TAG: Final = re.compile(r"([A-Z])-(.+)", re.DOTALL)
"""A label of a tagging scheme: a letter, and a type of entities."""

_SCHEMES: Final = {"BIOES": "BIES", "BILOU": "BILU", "BMES": "BMES", "BMEWO": "BMEW"}
"""Tagging schemes that mark the ends of entities, by name: the letters of their tags.

S, U and W are entities of one word; E and L are last words, and I and M are words within.
"""


class TokenLabels(LabelSets):
    """The head's section in a manifest. Labels are, for example, ``O``, ``B-PER``, ``I-PER``."""

    further: tuple[LabelSet, ...] = ()


@lru_cache(256)
def tag_scheme(labels: tuple[str, ...]) -> str | None:
    """Return the scheme of labels, if it is one that marks the ends of entities; else None.

    All labels like ``X-TYPE`` have letters of the scheme, and one type has both a beginning and
    an end, so that ``E-MAIL`` beside ``B-PER`` and ``I-PER`` is a type of its own.
    """
    tags = [match.groups() for match in map(_TAG.fullmatch, labels) if match]
    letters = {letter for letter, _ in tags}
    begun, ended = ({kind for letter, kind in tags if letter in role} for role in ("B", "ELSUW"))
    if not begun & ended:
        return None
    return next((name for name, known in _SCHEMES.items() if letters <= set(known)), None)


def as_iob2(tags: Sequence[str], labels: tuple[str, ...]) -> Sequence[str]:
    """Return the tags of a text in IOB2, ``B-`` and ``I-``, if their labels mark ends.

    For example, ``B-PER E-PER S-PER S-PER`` becomes ``B-PER I-PER B-PER B-PER``. What follows an
    end begins an entity, whatever its letter, and so does what continues another type or nothing.

    Args:
        tags: in the order of the text.
        labels: all labels of the model; of other schemes, the tags are returned as they are.
    """
    if tag_scheme(labels) is None:
        return tags
    converted = []
    continued = ""  # the type of the entity that has not ended
    for tag in tags:
        if (match := _TAG.fullmatch(tag)) is None:
            continued = ""
            converted.append(tag)
            continue
        letter, kind = match.groups()
        converted.append(f"{'I' if letter in 'IMEL' and kind == continued else 'B'}-{kind}")
        continued = "" if letter in "ELSUW" else kind
    return converted


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
    per_token=True,
    options=TokenLabels,
    model_sizes=_model_sizes,
)
