"""The route ``POST /``, which chooses the task from the body.

Clients that know only a base address send every task there: ``InferenceClient(base_url=...)`` of
huggingface_hub, and text-embeddings-inference's own users.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import InvalidRequest, WrongTask
from cloze.service.http.json_bodies import load, run_anywhere, validate
from cloze.service.http.routes import Route, RouteDoc
from cloze.service.protocols.protocol import ProtocolContext
from cloze.service.protocols.task_route import Endpoint, TaskRoute, gate_models
from cloze.service.tasks import Task, embed, fill_mask, text_classification, token_classification
from cloze.service.tasks.task import INPUTS, NotEmpty, NotEmptyText, WireModel

_CLASSIFYING: Final = (text_classification.TASK, token_classification.TASK)
"""Tasks whose bodies look the same."""


class DispatchBody(WireModel):
    """A body of any task that ``POST /`` knows; the route of the task documents its fields."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    inputs: Annotated[Any, NotEmptyText, NotEmpty] = Field(description="the inputs of the task")
    parameters: dict[str, Any] | None = Field(None, description="its parameters")


class Dispatcher:
    """The handler of ``POST /``.

    Args:
        routes: the native route of each task, by the task's name.
        context: the parts of the service that the handler uses.
    """

    def __init__(self, routes: Mapping[str, TaskRoute], context: ProtocolContext) -> None:
        self._routes = routes
        self._endpoints = {name: Endpoint(route, context) for name, route in routes.items()}
        self._context = context
        self._by_field = {
            field: task for task in context.tasks.values() for field in task.own_fields
        }

    def route(self, doc: RouteDoc) -> Route:
        """Return the route."""
        return Route("POST", "/", self._answer, doc, gate_models(self._context.models.pipelines))

    async def _answer(self, request: Request) -> Response:
        with self._context.watch.request(request) as watched:
            data = await watched.read_body(self._context.limits.body.max_bytes)
            task, body = await run_anywhere(len(data), self._parse, data)
            endpoint = self._endpoints[task.name]
            return await endpoint.answer_body(request, body, len(data), watched)

    def _parse(self, data: bytes) -> tuple[Task, BaseModel]:
        """Return the task that a body asks for, and the body of that task.

        Raises:
            RequestError: the body fits no task that this server offers.
        """
        value = load(data, self._context.limits.body)
        task = self._choose(validate(DispatchBody, value))
        if task.name not in self._routes:
            raise WrongTask(f"this server does not offer {task.name}")
        return task, validate(self._routes[task.name].body, value)

    def _choose(self, body: DispatchBody) -> Task:
        """Return the task that a body asks for.

        Raises:
            InvalidRequest: the body fits no task, or it fits text and token classification and not
                exactly one of the two is served.
        """
        texts = body.inputs if isinstance(body.inputs, list) else [body.inputs]
        for item in texts:
            if isinstance(item, dict):
                return self._task_of_fields(item)
        mask = self._mask
        if mask and any(isinstance(text, str) and mask in text for text in texts):
            return fill_mask.TASK
        if body.parameters is None:
            return embed.TASK
        served = [task for task in _CLASSIFYING if self._context.models.serving(task)]
        if len(served) == 1:
            return served[0]
        routes = " or ".join(task.route for task in _CLASSIFYING)
        kinds = "both" if served else "neither"
        raise InvalidRequest(
            f"without a mask and with parameters may be for {routes}, and {kinds} of them "
            "is served; send the request to the route of its task",
            INPUTS,
        )

    @property
    def _mask(self) -> str | None:
        """The mask token of the default model for fill-mask, if there is one."""
        served = self._context.models.serving(fill_mask.TASK)
        return served[0].manifest.tokenizer.mask_token if served else None

    def _task_of_fields(self, item: Mapping[str, Any]) -> Task:
        """Return the task that inputs with the fields of an object are for.

        Raises:
            InvalidRequest: the object has none of the fields.
        """
        for field, task in self._by_field.items():
            if field in item:
                return task
        known = ", ".join(self._by_field)
        raise InvalidRequest(f"has an object that fits no task: it has none of {known}", INPUTS)
