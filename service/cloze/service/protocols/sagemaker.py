"""SageMaker's protocol: ``GET /ping`` and ``POST /invocations``.

A body is that of any task's native route, of OpenAI's embeddings, of `/rerank` or of `/v1/score`.
One with ``input`` for a model that gives no embeddings is vLLM's, of `/classify` or of `/pooling`.
An answer is that of the route. Errors are native ones: SageMaker passes both on to its client.

Source: "Use your own inference code with hosting services", Amazon SageMaker's developer guide.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from cloze.service.core import ServedRequest
from cloze.service.http.body import load
from cloze.service.http.routes import Route
from cloze.service.protocols import openai, pooling, reranking, tei, vllm
from cloze.service.protocols.native import Dispatcher
from cloze.service.protocols.protocol import (
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    answer_probe,
    get_route,
)
from cloze.service.protocols.reranking import RANKED_BY
from cloze.service.tasks import rerank


class _Invocations(Dispatcher):
    """The route of all tasks: what ``POST /`` answers, and the bodies without ``inputs``."""

    def __init__(self, context: ProtocolContext) -> None:
        super().__init__(context)
        self._by_field: dict[str, TaskRoute] = {
            **vllm.other_routes(context)["/score"],
            **reranking.other_routes(context),  # documents without queries
            "query": tei.rerank_route(context),
        }
        self._by_model = [
            openai.Embeddings(context),
            vllm.other_routes(context)["/classify"]["input"],
            pooling.Pooling(context),
        ]
        examples = {
            **self.doc.examples,
            "OpenAI's embeddings": {"input": "A cat sat.", "model": "cloze-bert"},
            rerank.TASK.name: {"query": "Who died?", "documents": ["A ship left."]},
        }
        summary = "The task that fits the body, for SageMaker"
        self.doc = replace(
            self.doc,
            summary=summary,
            tag="SageMaker",
            examples=examples,
            headers={**self.doc.headers, **RANKED_BY},
        )

    def parse(self, request: ServedRequest, data: bytes) -> tuple[TaskRoute, Any]:
        value = load(data, self.context.body_limits)
        if isinstance(value, dict) and "inputs" not in value:
            if "input" in value:
                return self._of_input(request, value).parse(request, data)
            for field, route in self._by_field.items():
                if field in value:
                    return route.parse(request, data)
        return self.read(request, value)

    def _of_input(self, request: ServedRequest, body: dict[str, Any]) -> TaskRoute:
        """Return the first route that the model of a body serves, by default embeddings."""
        models, name = self.context.models_of(request), body.get("model")
        if isinstance(name, str):
            named = models.named(name)
            for route in self._by_model:
                if named in route.serving(models):
                    return route
        return self._by_model[0]


def _routes(context: ProtocolContext) -> Sequence[Route]:
    ping = partial(answer_probe, context.state.why_unready, None)
    summary = "Readiness, for SageMaker"
    return [
        get_route("/ping", ping, summary, None, 503, tag="SageMaker"),
        _Invocations(context).bind("/invocations"),
    ]


PROTOCOL: Final = WireProtocol(_routes)
