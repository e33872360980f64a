"""Vertex AI's protocol and KServe's V1: ``{"instances", "parameters"?}`` -> ``{"predictions"}``.

An instance is a text, or the body of a native route: ``{"inputs", "parameters"?, "model"?}``. The
instance may have a ``type``, the name of its task, as instances for text-embeddings-inference have.
Its prediction is the answer of the native route to that body. All instances of a request are of one
task, and run as one request of that task. An instance of the type ``rerank`` stands alone. The
instance is the body of `/rerank` in the shape of text-embeddings-inference.

For example, ``{"instances": ["a", {"inputs": ["b", "c"]}]}`` runs as the body ``{"inputs": ["a",
"b", "c"]}`` of `/embed`. With one vector per letter, the answer is ``{"predictions": [[A], [B,
C]]}``.

Sources: Vertex AI's requirements of custom containers, and KServe's V1 data plane.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final
from urllib.parse import unquote

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from cloze.service import errors
from cloze.service.core import ServedRequest
from cloze.service.http.body import load, validate
from cloze.service.http.routes import Route, RouteDoc
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.protocols import tei
from cloze.service.protocols.instances import (
    INSTANCES,
    PARAMETERS,
    Joined,
    Predictions,
    Ranked,
    check_model,
    is_list,
    native_fields,
    read_instances,
)
from cloze.service.protocols.native import PARAMETERS_AT_ROOT, Dispatcher, NativeRoute
from cloze.service.protocols.protocol import (
    ErrorBody,
    LenientModel,
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    answer_probe,
    answer_task,
    error_body,
    get_route,
)
from cloze.service.protocols.rank_routes import RANKED_BY
from cloze.service.tasks import (
    Task,
    embed,
    rerank,
    text_classification,
    token_classification,
)
from cloze.service.tasks.wire import NotEmpty, NotEmptyText

_TAG: Final = "Vertex AI and KServe V1"

_OF_VECTORS: Final = frozenset(embed.EmbedParameters.model_fields).difference(
    text_classification.TextClassificationParameters.model_fields,
    token_classification.TokenClassificationParameters.model_fields,
)
"""Parameters of embeddings that no task of the same inputs has."""


class InstancesBody(LenientModel):
    """The body of ``POST /vertex`` and of ``POST /v1/models/{model}:predict``."""

    instances: Annotated[list[Annotated[Any, NotEmptyText, NotEmpty]], NotEmpty] = Field(
        examples=[["What is deep learning?"]]
    )
    """texts, or bodies of one task: {"inputs", "parameters"?, "model"?, "type"?}"""
    parameters: dict[str, Any] | None = None
    """parameters of the task; those of the instances take precedence"""


class _Predict(TaskRoute):
    """The route of instances of all tasks."""

    body = InstancesBody
    doc = RouteDoc(
        "The predictions of one task for instances",
        _TAG,
        Predictions,
        headers=RANKED_BY,
        examples={
            "Two texts": {"instances": ["What is deep learning?", {"inputs": "A cat sat."}]},
            "A task by name": {"instances": [{"type": "embed", "inputs": "A cat sat."}]},
            "Ranks": {
                "instances": [{"type": "rerank", "query": "Who died?", "texts": ["A ship left."]}]
            },
        },
    )

    def __init__(self, context: ProtocolContext) -> None:
        self._dispatcher, tasks = Dispatcher(context), context.tasks.values()
        self._known = {name for task in tasks for name in task.parameters.model_fields}
        self._rerank = tei.Rerank(context)
        super().__init__(context)

    def _serving(self, models: Models) -> Sequence[Pipeline]:
        return models.pipelines

    def parse(
        self, request: ServedRequest, data: bytes, model: str | None = None
    ) -> tuple[TaskRoute, Any]:
        """Return the route of the instances' task, and all instances as one body of that route.

        Args:
            model: the model that the path names.
        """
        body = validate(InstancesBody, load(data, self.context.body_limits))
        first = next(iter(body.instances), None)
        if isinstance(first, dict) and first.get("type") == rerank.TASK.name:
            return self._ranked(body, model)
        models = self.context.models_of(request)
        if model is not None:
            models = models.within(frozenset((models.named(model).reference,)))
        inputs, others = read_instances(body.instances, model)
        joined = inputs[0]
        if len(inputs) > 1:
            joined = [one for each in inputs for one in (each if is_list(each) else [each])]
        native = self._route(others, joined, body.parameters, models)
        own = native_fields(native.task, others, None)
        fields = native_fields(native.task, others, body.parameters)
        if model is not None:
            fields["model"] = model
        try:
            parsed = validate(native.body, fields | {"inputs": joined})
        except errors.InvalidBody:
            if (count := len(inputs)) > (most := self.context.max_request_texts):
                raise errors.TooMany(f"has {count} texts; the limit is {most}", INSTANCES) from None
            for index, one in enumerate(inputs):
                at = INSTANCES.below(index)
                self._check_task(native.task, at, others, one, body.parameters, models)
                validate(native.body, own | {"inputs": one}, at)
            fields = native_fields(native.task, {}, body.parameters) | {"inputs": inputs[0]}
            at = PARAMETERS if native.task.name in PARAMETERS_AT_ROOT else errors.Location()
            validate(native.body, fields, at)
            problem = f"has {len(inputs)} instances; {native.task.name} takes one per request"
            raise errors.InvalidRequest(problem, INSTANCES) from None
        shared = (body.parameters or {}).keys() - own.keys() - own.get("parameters", {}).keys()
        return Joined(native, inputs, shared, body), parsed

    def _ranked(self, body: InstancesBody, model: str | None) -> tuple[TaskRoute, BaseModel]:
        """Return the route of an instance of the type rerank, and its fields as a body."""
        if (count := len(body.instances)) > 1:
            problem = f"has {count} instances; rerank takes one per request"
            raise errors.InvalidRequest(problem, INSTANCES)
        fields = {**(body.parameters or {}), **body.instances[0]}
        del fields["type"]
        check_model(fields, model)
        if model is not None:
            fields["model"] = model
        parsed = validate(tei.RerankBody, fields, INSTANCES.below(0))
        return Ranked(self._rerank, body), parsed

    def _route(
        self, others: Mapping[str, Any], inputs: Any, parameters: Any, models: Models
    ) -> NativeRoute:
        """Return the route of the task of inputs: the named one, or the one that ``POST /`` takes.

        Texts with parameters of embeddings only are embedded too. If no model embeds, texts without
        parameters are classified.
        """
        if (kind := others.get("type")) is not None:
            name = kind.replace("_", "-") if isinstance(kind, str) else ""
            if (route := self._dispatcher.routes.get(name)) is None:
                problem = f"is none of the types {', '.join(self._dispatcher.routes)}"
                raise errors.InvalidRequest(problem, INSTANCES.below(0, "type"))
            return route
        parameters = others.get("parameters") or parameters or None
        if parameters:  # a body may have thousands of unknown ones, for each of its instances
            parameters = {name: parameters[name] for name in self._known if name in parameters}
        embeds = bool(models.serving(embed.TASK))
        if embeds and _OF_VECTORS.intersection(parameters or ()):
            parameters = None
        elif parameters is None and not embeds:
            parameters = {}
        try:
            return self._dispatcher.route_of({"inputs": inputs, "parameters": parameters}, models)
        except errors.RequestError as error:
            raise error.moved(error.at and INSTANCES) from None

    def _check_task(self, task: Task, at: errors.Location, *call: Any) -> None:
        """Raise an error that names an instance of another task than the one of the request."""
        if (own := self._route(*call).task) is not task:
            problem = f"is for {own.name}, and another one for {task.name}; a request has one task"
            raise errors.InvalidRequest(problem, at)


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes of instances, and the health route that Vertex AI asks for."""
    route = _Predict(context)

    async def predict(request: Request) -> Response:
        model = unquote(request.path_params["model"])
        return await answer_task(context, partial(route.parse, model=model), request)

    bound = route.bind("/vertex")
    found = [bound, Route("POST", "/v1/models/{model}:predict", predict, bound.doc, bound.models)]
    if context.predict_route:
        found.append(route.bind(context.predict_route))
    if context.health_route:
        health = partial(answer_probe, context.state.why_unready, None)
        found.append(get_route(context.health_route, health, "Readiness", None, 503, tag=_TAG))
    return found


PROTOCOL: Final = WireProtocol(
    routes, ("",), ErrorBody, error_body, has_422=True, suffix=":predict"
)
