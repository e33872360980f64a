"""Writes the OpenAPI document of routes: requests, responses, errors and headers."""

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import TypeAdapter

from cloze.service.http.routes import JSON, NPY, RAW, Route

_REF = "#/components/schemas/{model}"

MODEL = ("string", "the model that answered, NAME@VERSION; absent if none was chosen")
REQUEST_ID = ("string", "the id of the request: the client's own `X-Request-Id`, or a random one")
_ERROR_HEADERS = {
    415: {"accept-encoding": ("string", "the content encodings that the server reads")},
    429: {"retry-after": ("integer", "whole seconds after which the request is admitted")},
}


def document(title: str, version: str, description: str, routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of routes."""
    schemas, definitions = _schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schemas)
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": description},
        "paths": paths,
        "components": {"schemas": definitions},
    }


def _schemas(routes: Iterable[Route]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the schemas by (path, part), and the definitions that the schemas refer to."""
    inputs: list[Any] = []
    for route in routes:
        parts = {"body": route.doc.body, "result": route.doc.result, "error": route.doc.error_body}
        for part, annotation in parts.items():
            if annotation is not None:
                mode = "validation" if part == "body" else "serialization"
                inputs.append(((route.path, part), mode, TypeAdapter(annotation)))
    schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    by_part = {key: schema for (key, _), schema in schemas.items()}
    return by_part, definitions.get("$defs", {})


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    doc = route.doc
    headers = {**_common(route), **doc.headers}
    success: dict[str, Any] = {"description": "Success", "headers": _headers(headers)}
    content: dict[str, Any] = {}
    if doc.result is not None:
        content[JSON] = {"schema": schemas[route.path, "result"]}
    for media_type in doc.media_types:
        binary = media_type in (RAW, NPY)
        content[media_type] = {
            "schema": {"type": "string"} | ({"format": "binary"} if binary else {})
        }
    if content:
        success["content"] = content
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-z0-9]+', '_', route.path)}",
        "summary": doc.summary,
        "tags": [doc.tag],
        "responses": {"200": success} | {str(s): _error(s, route, schemas) for s in doc.errors},
    }
    if names := re.findall(r"\{(\w+)\}", route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if doc.body is not None:
        examples = {title: {"value": body} for title, body in doc.examples.items()}
        body = {"schema": schemas[route.path, "body"]} | (
            {"examples": examples} if examples else {}
        )
        operation["requestBody"] = {"required": True, "content": {JSON: body}}
    return operation


def _common(route: Route) -> dict[str, tuple[str, str]]:
    """Return the headers of every response of a route."""
    return {"x-request-id": REQUEST_ID} | ({"x-model": MODEL} if route.doc.body else {})


def _error(status: int, route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    headers = _common(route) | _ERROR_HEADERS.get(status, {})
    return {
        "description": "Client closed its connection"
        if status == 499
        else HTTPStatus(status).phrase,
        "headers": _headers(headers),
        "content": {JSON: {"schema": schemas[route.path, "error"]}},
    }


def _headers(headers: dict[str, tuple[str, str]]) -> dict[str, Any]:
    return {
        name: {"description": description, "schema": {"type": kind}}
        for name, (kind, description) in headers.items()
    }
