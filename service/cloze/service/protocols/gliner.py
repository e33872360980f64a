"""GLiNER's own server: ``POST /gliner``, for gliner's released ``GLiNERClient``.

Source: gliner 0.2.29, ``gliner.serve``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from pydantic import Field

from cloze.service.core import ServedRequest
from cloze.service.errors import InvalidRequest, Location, MissingField
from cloze.service.http.body import load, validate
from cloze.service.http.routes import Route, RouteDoc
from cloze.service.protocols.protocol import LenientModel, ProtocolContext, TaskRoute, WireProtocol
from cloze.service.protocols.shared_paths import ServedName
from cloze.service.tasks import entities
from cloze.service.tasks.task import INPUTS

_PATH: Final = "/gliner"


class GlinerBody(LenientModel):
    """The body of ``POST /gliner``."""

    text: str
    labels: entities.Labels
    threshold: float | None = None
    flat_ner: bool | None = None
    multi_label: bool | None = None
    relations: list[str] | None = Field(None, description="relations to find: none are supported")
    relation_threshold: float | None = Field(None, description="not read")
    adapter_id: str | None = Field(None, description="not supported")
    model: ServedName = None


@dataclass(frozen=True, slots=True)
class GlinerEntities:
    """The response to ``POST /gliner``."""

    entities: list[entities.Entity]


@dataclass(frozen=True, slots=True)
class GlinerErrorBody:
    """An error of ``POST /gliner``."""

    error: str


class _Gliner(TaskRoute):
    task = entities.TASK
    body = GlinerBody
    names: ClassVar = {INPUTS: "text"}
    doc = RouteDoc(
        "The entities of the request's own labels, in the shape of gliner's server",
        "GLiNER",
        GlinerEntities,
        examples={
            "One text": {"text": "Ada Lovelace was born in London.", "labels": ["person", "city"]}
        },
    )

    def parse(self, _: ServedRequest, data: bytes) -> tuple[TaskRoute, GlinerBody]:
        value = load(data, self.context.body_limits)
        for name in ("text", "labels"):
            if isinstance(value, dict) and name not in value:
                raise MissingField(f"{name} is missing; the body needs text and labels")
        return self, validate(GlinerBody, value)

    def to_call(self, _: ServedRequest, body: GlinerBody) -> tuple[Any, Any]:
        for name in ("relations", "adapter_id"):
            if getattr(body, name):
                raise InvalidRequest("is not supported; leave it out", Location((name,)))
        parameters = entities.EntityParameters(
            labels=body.labels,
            threshold=body.threshold,
            flat_ner=body.flat_ner,
            multi_label=body.multi_label,
        )
        return body.text, parameters

    def respond(self, _: ServedRequest, __: Any, value: Any) -> Any:
        [found] = value
        return GlinerEntities(found)


def _routes(context: ProtocolContext) -> Sequence[Route]:
    return [_Gliner(context).bind(_PATH)] if entities.TASK.name in context.tasks else []


PROTOCOL: Final = WireProtocol(_routes, (_PATH,), GlinerErrorBody)
