"""The choice of a label set of a model that has several."""

from typing import Any, Final

from pydantic import Field

from cloze.model_store.heads.label_sets import LabelSet, LabelSets
from cloze.service.core import InvalidRequest, Location, quoted
from cloze.service.tasks.task import TaskContext

LABEL_SET: Final[Any] = Field(
    None,
    description="name of one of the model's label sets, if it has several; "
    "the default is the first",
)
"""The parameter of a request that names a label set."""


def choose_label_set(
    options: LabelSets, name: str | None, context: TaskContext
) -> tuple[LabelSet, slice]:
    """Return the named label set and its logits.

    Raises:
        InvalidRequest: the model has no label set of that name.
    """
    try:
        return options.choose(name)
    except KeyError:
        known = ", ".join(filter(None, options.names))[:200] or "none"
        reference = context.manifest.reference
        problem = f"{quoted(name or '')} is not one of the label sets of {reference} ({known})"
        raise InvalidRequest(problem, Location(("label_set",))) from None
