"""OpenAPI 3.1, generated from the route table and the pydantic models: what is served is what is described."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from coordinator.api.problems import MEDIA_TYPE
from coordinator.api.rest_call import ID_PATTERN, VERSION_PATTERN
from coordinator.api.rest_table import Route
from coordinator.wire.messages import Problem

_REFERENCE = "#/components/schemas/{model}"
_PART = re.compile(r"\{(\w+)\}")
_DESCRIPTION = "Trains language models with reinforcement learning on remote workers. Errors are RFC 9457 problem documents."
_WORDS = {
    "400": "the body is not JSON",
    "401": "no valid token",
    "403": "the token may not",
    "404": "nothing there that the token may see",
    "408": "the body came too slowly",
    "409": "its state does not allow it",
    "413": "the body is too large",
    "415": "a media type or encoding that is not taken",
    "422": "a value is wrong",
    "503": "not now; Retry-After says when",
}
_RETRY = {"Retry-After": {"description": "seconds", "required": True, "schema": {"type": "integer", "minimum": 1}}}
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "the same key and body give the same stored answer for 24 h",
    "schema": {"type": "string", "pattern": r"^[\x21-\x7e]{1,200}$"},
}
_LAST_EVENT = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "description": "continue after this event",
    "schema": {"type": "string", "pattern": "^[0-9]{1,18}$"},
}


def document(routes: Sequence[Route], *, version: str) -> dict[str, Any]:
    """The whole document."""
    models = sorted(_models(routes), key=lambda model: model.__name__)
    inputs = {route.body for route in routes if route.body is not None}
    _, schemas = models_json_schema(
        [(model, "validation" if model in inputs else "serialization") for model in models], ref_template=_REFERENCE
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ECHO-2 coordinator", "version": version, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _models(routes: Iterable[Route]) -> set[type[BaseModel]]:
    named = {model for route in routes for model in (route.body, route.answer) if model is not None}
    return named | {Problem}


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": _parameters(route),
        "responses": _responses(route),
        "x-least-role": route.role,
        "security": [] if route.role == "public" else [{"token": []}],
    }
    if route.body_kind != "none":
        operation["requestBody"] = _request_body(route)
    return operation


def _operation_id(route: Route) -> str:
    path = route.path.removeprefix("/api/v1").replace("{", "").replace("}", "")
    return "_".join([route.method.lower(), *re.findall(r"\w+", path)]) if path != "/" else "get_dashboard"


def _parameters(route: Route) -> list[dict[str, Any]]:
    parameters = [_path_parameter(name) for name in _PART.findall(route.path)]
    parameters += _query_parameters(route.query)
    if route.is_idempotent_post:
        parameters.append(_KEY)
    if route.media == "text/event-stream":
        parameters.append(_LAST_EVENT)
    return parameters


def _path_parameter(name: str) -> dict[str, Any]:
    pattern = VERSION_PATTERN if name == "version" else ID_PATTERN
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": pattern}}


def _query_parameters(query: type[BaseModel]) -> list[dict[str, Any]]:
    schema = query.model_json_schema()
    required = schema.get("required", [])
    return [_query_parameter(name, dict(inner), name in required) for name, inner in schema.get("properties", {}).items()]


def _query_parameter(name: str, schema: dict[str, Any], required: bool) -> dict[str, Any]:
    words = schema.pop("description", "")
    schema.pop("title", None)
    if schema.get("default", ...) is None:
        del schema["default"]
    choices = [choice for choice in schema.get("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:  # a query has no null: absent says it
        schema = {**{key: value for key, value in schema.items() if key != "anyOf"}, **choices[0]}
    return {"name": name, "in": "query", "required": required, "description": words, "schema": schema}


def _request_body(route: Route) -> dict[str, Any]:
    if route.body is None:
        schema: dict[str, Any] = {"type": "string", "format": "binary", "minLength": 1}
        return {"required": True, "content": {"application/octet-stream": {"schema": schema}}}
    reference = {"$ref": _REFERENCE.format(model=route.body.__name__)}
    return {"required": route.body_kind == "json", "content": {"application/json": {"schema": reference}}}


def _responses(route: Route) -> dict[str, Any]:
    responses: dict[str, Any] = {str(route.status): _success(route)}
    if route.media == "text/event-stream":
        responses["204"] = {"description": "nothing will follow"}
    if route.media == "application/octet-stream":
        responses["206"] = {"description": "the range asked for", "content": {route.media: {}}}
        responses["304"] = {"description": "unchanged"}
        responses["412"] = {"description": "changed"}
        responses["416"] = {"description": "no such range"}
    for status in _refusals(route):
        responses[status] = _refusal(status)
    if route.path == "/readyz":
        responses["503"] = {**_success(route), "description": "not ready", "headers": _RETRY}
    return responses


def _success(route: Route) -> dict[str, Any]:
    if route.answer is None:
        return {"description": "done", "content": {route.media: {}}}
    reference = {"$ref": _REFERENCE.format(model=route.answer.__name__)}
    return {"description": "done", "content": {"application/json": {"schema": reference}}}


def _refusals(route: Route) -> list[str]:
    found = {"422", "503"}
    if route.role != "public" or route.path == "/metrics":
        found |= {"401", "403"}
    if "{" in route.path or route.body_kind != "none":  # a body too names workers, jobs and files
        found.add("404")
    if route.body_kind != "none":
        found |= {"400", "408", "413", "415"}
    if route.method != "GET":
        found.add("409")
    return sorted(found)


def _refusal(status: str) -> dict[str, Any]:
    refusal: dict[str, Any] = {
        "description": _WORDS[status],
        "content": {MEDIA_TYPE: {"schema": {"$ref": _REFERENCE.format(model="Problem")}}},
    }
    if status == "503":
        refusal["headers"] = _RETRY
    return refusal
