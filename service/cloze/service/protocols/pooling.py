"""vLLM's ``/pooling``: the vectors or the scores of texts or of their tokens.

The field `task` is one of vLLM's: ``embed`` is `/embed`, ``token_embed`` is `/embed_all`,
``classify`` has the scores of all labels of a text, and ``token_classify`` those of each token. The
default is ``token_embed``, or ``token_classify`` if the model gives no vectors of tokens.

Source: vLLM's OpenAPI document.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np
from pydantic import Field

from cloze.service.core import Float32, ServedRequest
from cloze.service.errors import InvalidRequest, Location, WrongTask
from cloze.service.http.body import load, validate
from cloze.service.http.errors import ErrorInfo
from cloze.service.http.routes import RAW, RouteDoc
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.protocols import openai
from cloze.service.protocols.protocol import ProtocolContext, TaskRoute, WireProtocol
from cloze.service.protocols.shared_paths import ServedName
from cloze.service.protocols.vector_numbers import (
    BYTES,
    METADATA,
    Envelope,
    NumbersBody,
    bytes_answer,
    check_described,
)
from cloze.service.protocols.vllm import LabelParameters
from cloze.service.tasks import Task, embed, embed_all, text_classification, token_classification
from cloze.service.tasks.task import INPUTS, softmax
from cloze.service.tasks.texts import PromptTokens, TextsOrIds, TokenLimit
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


def _error_body(error: ErrorInfo) -> PoolingErrorBody:
    kind: Any = "BadRequestError" if error.status < 500 else "InternalServerError"
    kind = "NotFoundError" if error.status == 404 else kind
    code = 400 if error.status == 422 else error.status
    return PoolingErrorBody(PoolingError(error.message, kind, None, code))


_PATH: Final = "/pooling"
_VECTOR_FIELDS: Final = ("dimensions", "normalize")
_ACTIVATION: Final = "use_activation"
_TASK_FIELDS: Final = (*_VECTOR_FIELDS, _ACTIVATION)
"""Fields of a body that only some tasks have: those of a text's vector, and that of labels."""


class _TokenParameters(PromptTokens, embed_all.TokenParameters):
    """The parameters of the task, and vLLM's limit."""


class _PoolingRoute(TaskRoute):
    """The route of one task, which has some of `_TASK_FIELDS`."""

    body = PoolingBody
    names: ClassVar[Mapping[Location, str]] = {INPUTS: "input"}
    doc = RouteDoc(
        "The vectors or the scores of texts or of their tokens, in vLLM's shape",
        "vLLM",
        PooledTexts,
        examples={
            "Vectors of tokens": {"input": "A cat sat.", "task": "token_embed"},
            "The model's labels": {"input": ["The room was loud."], "task": "classify"},
        },
        media_types=(RAW,),
        headers=METADATA,
    )

    def __init__(self, context: ProtocolContext, task: Task, fields: Sequence[str] = ()) -> None:
        self.task, self._fields = task, fields
        super().__init__(context)

    def to_call(self, _: ServedRequest, body: PoolingBody) -> tuple[Any, Any]:
        check_described(body.encoding_format, body.input)
        for name in _TASK_FIELDS:
            if name not in self._fields and getattr(body, name) is not None:
                raise InvalidRequest(
                    f"is not for {self.task.name}; leave it out", Location((name,))
                )
        texts = body.input if isinstance(body.input, list) else [body.input]
        if _ACTIVATION in self._fields and not all(isinstance(text, str) for text in texts):
            problem = f"has token ids; {self.task.name} needs texts"
            raise InvalidRequest(problem, Location(("input",)))
        return body.input, self._parameters(body)

    def _parameters(self, body: PoolingBody) -> Any:
        most = body.truncate_prompt_tokens
        if self.task is embed.TASK:
            return openai.EmbedParameters(
                truncate_prompt_tokens=most, dimensions=body.dimensions, normalize=body.normalize
            )
        if self.task is embed_all.TASK:
            return _TokenParameters(truncate_prompt_tokens=most)
        if self.task is text_classification.IN_ORDER:
            function: Any = "none" if body.use_activation is False else None
            return LabelParameters(function_to_apply=function, truncate_prompt_tokens=most)
        if most not in (None, -1):
            at = Location(("truncate_prompt_tokens",))
            raise InvalidRequest("is not served for token_classify; leave it out", at)
        return token_classification.TokenClassificationParameters()

    def respond(self, request: ServedRequest, body: PoolingBody, value: Any) -> Any:
        arrays = [self.numbers(body, one) for one in value]
        created = int(self.context.limits.clock.wall())
        identity = f"pool-{request.identity.decode('ascii')}"
        model, usage = body.model or request.model, openai.Usage(request.tokens, request.tokens)
        form = body.encoding_format
        if form in BYTES:
            return bytes_answer(body, form, arrays, Envelope(identity, created, model, usage))
        data: list[Any] = [*map(body.base64, arrays)] if form == "base64" else arrays
        rows = [PooledText(index, "pooling", numbers) for index, numbers in enumerate(data)]
        return PooledTexts(identity, "list", created, model, rows, usage)

    def numbers(self, body: PoolingBody, one: Any) -> Float32:
        """Return the numbers [D] or [S, D] of what the task gives for a text."""
        if self.task is text_classification.IN_ORDER:
            return np.array([label.score for label in one], np.float32)
        if self.task is token_classification.LOGITS and body.use_activation is not False:
            return softmax(one)
        vectors: Float32 = np.asarray(one, np.float32)
        return vectors


class Pooling(_PoolingRoute):
    """The route of all tasks, which the body chooses."""

    def __init__(self, context: ProtocolContext) -> None:
        super().__init__(context, embed_all.TASK)
        routes: dict[TaskName, _PoolingRoute] = {
            "token_embed": _PoolingRoute(context, embed_all.TASK),
            "token_classify": _PoolingRoute(context, token_classification.LOGITS, (_ACTIVATION,)),
            "embed": _PoolingRoute(context, embed.TASK, _VECTOR_FIELDS),
            "classify": _PoolingRoute(context, text_classification.IN_ORDER, (_ACTIVATION,)),
        }
        self._routes = {n: r for n, r in routes.items() if r.task.name in context.tasks}

    def _serving(self, models: Models) -> Sequence[Pipeline]:
        return [*dict.fromkeys(p for route in self._routes.values() for p in route.serving(models))]

    def parse(self, request: ServedRequest, data: bytes) -> tuple[TaskRoute, PoolingBody]:
        """Return the route of the body's task, and the body.

        Raises:
            WrongTask: the model, or all models, cannot do the task.
        """
        body = validate(PoolingBody, load(data, self.context.body_limits))
        models = self.context.models_of(request)
        named = None if body.model is None else models.named(body.model)
        served = [
            name
            for name, route in self._routes.items()
            if (pipelines := route.serving(models)) and (named is None or named in pipelines)
        ]
        task = body.task or next((name for name in served if name.startswith("token_")), "score")
        if task not in served:
            whom = "any served model" if named is None else f"the model {named.reference}"
            known = " or ".join(served) or "no task of this route"
            raise WrongTask(f"Task {task} is not supported by {whom}, which does {known}")
        return self._routes[task], body


PROTOCOL: Final = WireProtocol(
    lambda context: [Pooling(context).bind(_PATH)], (_PATH,), PoolingErrorBody, _error_body
)
