"""The instances of a request, which run as one request of a native route; see `vertex`."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from pydantic import BaseModel

from cloze.service import errors
from cloze.service.core import ServedRequest
from cloze.service.protocols import tei
from cloze.service.protocols.native import PARAMETERS_AT_ROOT, NativeRoute
from cloze.service.protocols.protocol import TaskRoute, ignored_fields
from cloze.service.tasks import Task
from cloze.service.tasks.task import INPUTS

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
