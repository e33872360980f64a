"""The shape of an error in text-embeddings-inference's protocol, which the native one shares."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloze.service.http.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """An error in the shape of text-embeddings-inference."""

    error: str
    error_type: str


def write_error(error: ErrorInfo) -> tuple[int, Mapping[str, Any]]:
    """Return the status and the body of an error."""
    return error.status, {"error": error.message, "error_type": error.kind}
