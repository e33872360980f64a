"""The bodies of vLLM's ``/pooling``: of requests, answers and errors; see `pooling`."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from cloze.service.http.errors import ErrorInfo
from cloze.service.protocols import openai
from cloze.service.protocols.shared_paths import ServedName
from cloze.service.protocols.vector_numbers import NumbersBody
from cloze.service.tasks.texts import TextsOrIds, TokenLimit
from cloze.service.tasks.wire import Count

TaskName = Literal["embed", "token_embed", "classify", "token_classify", "score", "plugin"]


class PoolingBody(NumbersBody):
    """The body of ``POST /pooling``."""

    model: ServedName = None
    input: TextsOrIds = Field(description="a text, its token ids, or a list of either")
    task: TaskName | None = Field(
        None,
        description="what to compute; score and plugin are refused; the default is token_embed, or "
        "token_classify if the model gives no vectors of tokens",
    )
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = Field(
        None,
        description="how the numbers are written; bytes and bytes_only have no JSON, and a header "
        '"metadata" describes bytes; the default is float',
    )
    dimensions: Count | None = Field(None, description="leading dimensions to keep, for embed")
    normalize: bool | None = None
    """whether to scale vectors of embed to length 1; default: the model's"""
    use_activation: bool | None = None
    """whether scores of labels are probabilities; the default is true"""
    truncate_prompt_tokens: TokenLimit = None
    user: str | None = Field(None, description="accepted and ignored")


@dataclass(frozen=True, slots=True)
class PooledText:
    """The numbers of a text: [D], or [tokens][D]; base64 has them in this order."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


@dataclass(frozen=True, slots=True)
class PooledTexts:
    """The response to ``POST /pooling``; ``created`` is in seconds since 1970."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledText]
    usage: openai.Usage


@dataclass(frozen=True, slots=True)
class PoolingError:
    """The details of an error; ``code`` is its status."""

    message: str
    type: Literal["BadRequestError", "NotFoundError", "InternalServerError"]
    param: str | None
    code: int


@dataclass(frozen=True, slots=True)
class PoolingErrorBody:
    """An error in vLLM's shape."""

    error: PoolingError


def error_body(error: ErrorInfo) -> PoolingErrorBody:
    """Return the body of an error."""
    kind: Any = "BadRequestError" if error.status < 500 else "InternalServerError"
    kind = "NotFoundError" if error.status == 404 else kind
    code = 400 if error.status == 422 else error.status
    return PoolingErrorBody(PoolingError(error.message, kind, None, code))
