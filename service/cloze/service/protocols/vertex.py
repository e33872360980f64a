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

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
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
    ignored_fields,
)
from cloze.service.protocols.reranking import RANKED_BY
from cloze.service.tasks import Task, embed, rerank, text_classification, token_classification
from cloze.service.tasks.task import INPUTS
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


INSTANCES: Final = errors.Location(("instances",))
PARAMETERS: Final = errors.Location(("parameters",))


@dataclass(frozen=True, slots=True)
class Predictions:
    """The response to instances: the native answer to each of them, in their order."""

    predictions: list[Any]


def read_instances(instances: Sequence[Any], model: str | None) -> tuple[list[Any], dict[str, Any]]:
    """Return the inputs of each instance, and the other fields, which all instances share.

    Raises:
        RequestError: there is no instance, or one lacks inputs, or has other fields than the first
            or another model than the path.
    """
    if not instances:
        raise errors.EmptyRequest("is an empty list; it needs at least 1 instance", INSTANCES)
    inputs: list[Any] = []
    first: dict[str, Any] = {}
    for index, instance in enumerate(instances):
        at = INSTANCES.below(index)
        fields = instance if isinstance(instance, dict) else {"inputs": instance}
        if "inputs" not in fields:
            raise errors.InvalidBody('has no field "inputs"', at)
        inputs.append(fields["inputs"])
        if isinstance(inputs[-1], int | float):  # several of them would be the token ids of a text
            raise errors.InvalidBody("is a number; an input is a text, token ids or an object", at)
        if inputs[-1] == []:
            problem = "is an empty list; it needs at least 1 text"
            raise errors.EmptyRequest(problem, at.below("inputs"))
        others = {name: value for name, value in fields.items() if name != "inputs"}
        first = first if index else others
        if not _are_equal(others, first):
            raise errors.InvalidRequest(
                "has other fields than instances[0]; the instances of a request have one task, "
                "one model and one set of parameters",
                at,
            )
    if not isinstance(first.get("parameters"), dict | None):
        raise errors.InvalidBody("is no object", INSTANCES.below(0, "parameters"))
    check_model(first, model)
    return inputs, first


def check_model(instance: Mapping[str, Any], model: str | None) -> None:
    """Raise an error if the first instance names another model than the path."""
    if model is not None and instance.get("model") not in (None, model):
        problem = f"is another model than the path's, {errors.quoted(model)}"
        raise errors.InvalidRequest(problem, INSTANCES.below(0, "model"))


def _are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two objects are equal; values that are nested a thousand times are not."""
    try:
        return one == other
    except RecursionError:
        return False


def is_list(inputs: Any) -> bool:
    """Return whether inputs are a list of inputs; a list of token ids is one input."""
    return isinstance(inputs, list) and not isinstance(inputs[0], int)


def native_fields(task: Task, others: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    """Return the fields of a native body, without its inputs."""
    fields = {name: value for name, value in others.items() if name not in ("type", "parameters")}
    together = {**(parameters or {}), **(others.get("parameters") or {})}
    if task.name in PARAMETERS_AT_ROOT:
        return together | fields
    return fields | {"parameters": together} if together else fields


class Ranked(tei.Rerank):
    """The route of the only instance of a request, whose `type` is ``rerank``.

    Args:
        route: the route of such instances.
        body: the body of the request.
    """

    def __init__(self, route: tei.Rerank, body: BaseModel) -> None:
        self.context, self.serving, self._body = route.context, route.serving, body

    def in_body(self, at: errors.Location, _: Any) -> errors.Location:
        """Return the location in the instance."""
        return INSTANCES.below(0, *at)

    def respond(self, request: ServedRequest, body: Any, value: Any) -> Any:
        """Return the ranks of text-embeddings-inference as the only prediction."""
        _warn(request, self._body)
        return self.answer(request, Predictions([self.rows(request, body, value)]), value.by)


def _warn(request: ServedRequest, body: BaseModel) -> None:
    if body.model_extra:
        request.warnings = (ignored_fields(body, body), *request.warnings)


class Joined(TaskRoute):
    """The native route of the instances of one request.

    Args:
        inputs: the inputs of each instance.
        shared: names of parameters that stand in the request's `parameters`.
        body: the body of the request.
    """

    def __init__(
        self, native: NativeRoute, inputs: Sequence[Any], shared: Set[str], body: BaseModel
    ) -> None:
        self.task, self.context, self.serving = native.task, native.context, native.serving
        self._native, self._inputs, self._shared, self._body = native, inputs, shared, body
        self._ends = [*accumulate(len(one) if is_list(one) else 1 for one in inputs)]

    def to_call(self, request: ServedRequest, body: Any) -> tuple[Any, Any]:
        """Return the inputs of all instances, and their parameters."""
        call = self._native.to_call(request, body)
        request.vector_format = None  # predictions are JSON
        return call

    def in_body(self, at: errors.Location, _: Any) -> errors.Location:
        """Return the location in an instance: ``instances[2].inputs`` for ``inputs[3]``."""
        if at[:1] != INPUTS:
            return PARAMETERS.below(*at) if at[0] in self._shared else at
        if len(self._inputs) == 1:
            return INSTANCES.below(0, *at)
        if len(at) == 1:
            return INSTANCES
        number = int(at[1])
        index = bisect_right(self._ends, number)
        one = self._inputs[index]
        inside = (number - self._ends[index] + len(one),) if is_list(one) else ()
        return INSTANCES.below(index, "inputs", *inside, *at[2:])

    def respond(self, request: ServedRequest, body: Any, value: Any) -> Predictions:
        """Return the answers of the native route by instance."""
        _warn(request, self._body)
        if len(self._inputs) == 1:
            return Predictions([self._native.respond(request, body, value)])
        predictions: list[Any] = []
        for first, end, inputs in zip([0, *self._ends], self._ends, self._inputs, strict=False):
            answer = value[first:end]
            if not is_list(inputs) and isinstance(body.inputs[first], self.task.alone):
                [answer] = answer
            if request.usage is not None:
                answer = {"result": answer, "usage": request.usage[first:end]}
            predictions.append(answer)
        return Predictions(predictions)


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


def _routes(context: ProtocolContext) -> Sequence[Route]:
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
    _routes, ("",), ErrorBody, error_body, has_422=True, suffix=":predict"
)
