"""Label sets of a classifier: its labels, and further sets of labels on the same encoder.

The logits of all sets lie side by side in one output of the graph, in the order of the sets. So a
graph has one classifier, however many sets it has.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from cloze.model_store.heads.head import Frozen
from cloze.model_store.limits import MAX_WIDTH

HEAD_SECTIONS: Final = "cloze_heads"
"""Settings of heads that transformers' ``config.json`` has no place for, by head name.

transformers has one set of labels per checkpoint.
"""

SetName = Annotated[str, StringConstraints(pattern=re.compile(r"^[\w.-]{1,64}\Z"))]
"""The name of a label set, as a client sends it. Rust takes 20 ms to compile this pattern."""


class LabelSet(Frozen):
    """Labels that one classifier chooses from.

    Attributes:
        name: name of the set; None: the classifier has only this set.
        labels: label names in the order of the logits.
        temperature: what the classifier's weights were divided by after training, so that scores
            are the share of right answers (Guo et al. 2017); None: they were not.
    """

    name: SetName | None = None
    labels: tuple[str, ...] = Field(min_length=1)
    temperature: float | None = Field(None, gt=0)

    @model_serializer(mode="wrap")
    def _leave_out(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what a set does not say, so that earlier releases open its bundle."""
        section: dict[str, Any] = serialise(self)
        if self.temperature is None:
            section.pop("temperature", None)
        return section


class LabelSets(LabelSet):
    """The first label set of a classifier, which is the default, and the others."""

    further: Sequence[LabelSet] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = self.names
        if self.further and (None in names or len(set(names)) < len(names)):
            raise ValueError("several label sets need names that differ")
        return self

    @model_serializer(mode="wrap")
    def _leave_out(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what a single set does not say, so that earlier releases open its bundle."""
        section: dict[str, Any] = serialise(self)
        if self.temperature is None:
            section.pop("temperature", None)
        if self.names == (None,):
            section.pop("name", None)
            section.pop("further", None)
        return section

    @property
    def sets(self) -> tuple[LabelSet, ...]:
        """All label sets, the default first."""
        return (self, *self.further)

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names of all label sets."""
        return tuple(each.name for each in self.sets)

    @property
    def logits(self) -> int:
        """The number of logits of all sets."""
        return sum(len(each.labels) for each in self.sets)

    def columns(self) -> Iterator[tuple[LabelSet, slice]]:
        """Yield each set, the default first, with its logits."""
        first = 0
        for each in self.sets:
            end = first + len(each.labels)
            yield each, slice(first, end)
            first = end

    def calibrated(self, name: str | None, temperature: float) -> Self:
        """Return the label sets with the temperature of the set with this name."""
        update = {"temperature": temperature}
        if name == self.name:
            return self.model_copy(update=update)
        further = [
            each.model_copy(update=update) if each.name == name else each for each in self.further
        ]
        return self.model_copy(update={"further": tuple(further)})

    def choose(self, name: str | None = None) -> tuple[LabelSet, slice]:
        """Return the set with this name and the logits of the set; None: the default set.

        Raises:
            KeyError: no set has the name.
        """
        for each, columns in self.columns():
            if name is None or each.name == name:
                return each, columns
        raise KeyError(name)


_DEFAULT_LABELS: Final = 2


def read_labels(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of a ``config.json`` in the order of the logits, as transformers does.

    Raises:
        ValueError: ``id2label`` does not name every label from 0 on, or ``num_labels`` is no
            number of labels.
    """
    by_id = settings.get("id2label")
    if by_id is None:
        count = settings.get("num_labels", _DEFAULT_LABELS)
        if type(count) is not int or not 0 < count <= MAX_WIDTH:
            raise ValueError(
                f"num_labels must be a number from 1 to {MAX_WIDTH}, got {count!r:.80}"
            )
        return tuple(f"LABEL_{i}" for i in range(count))
    try:
        named = {int(number): str(label) for number, label in by_id.items()}
        labels = tuple(named[number] for number in range(len(named)))
    except (AttributeError, KeyError, TypeError, ValueError):
        labels = ()
    if not labels:
        shown = str(by_id)[:80]
        raise ValueError(f"id2label must name the labels 0 to N - 1, got {shown}")
    return labels
