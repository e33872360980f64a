"""Bodies that ignore unknown fields, as text-embeddings-inference does."""

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict

from cloze.service.tasks.task import WireModel

_LONGEST_NAME, _MOST_NAMES = 40, 8


class LenientModel(WireModel):
    """A part of a request body that may have unknown fields; known fields are validated."""

    model_config = ConfigDict(extra="allow")


def ignored_fields(body: Any) -> Sequence[str]:
    """Return a warning with the names of a body's unknown fields; none if all are known.

    Args:
        body: a `LenientModel`, whose ``parameters`` may be one too.
    """
    names = list(body.model_extra)
    if parameters := vars(body).get("parameters"):  # getattr of a missing field takes microseconds
        names += [f"parameters.{name}" for name in parameters.model_extra]
    if not names:
        return ()
    shown = ", ".join(ascii(name[:_LONGEST_NAME])[1:-1] for name in names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (f"ignored unknown fields: {shown}{more}",)
