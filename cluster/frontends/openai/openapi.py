"""/openapi.json: the routes that there are and the bodies that they take, as OpenAPI describes them."""

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from tandem import __version__
from tandem.cluster.frontends.http.app import NAMED, Routes
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope, encode
from tandem.cluster.frontends.openai.body_object import BodyObject

OPENAPI = "/openapi.json"
DIALECT = "3.1.0"  # the version whose schemas pydantic writes
SCHEMAS = "#/components/schemas/"
STREAM = "stream"  # the field of bodies that may be answered by events


class OpenApi:
    """Made when it is first asked for, and kept."""

    def __init__(self, routes: Routes, beside: Routes, bodies: Mapping[str, type[BodyObject]]) -> None:
        """routes, beside: all that are described. bodies: what those with POST take, by their paths."""
        self._routes = routes
        self._beside = beside
        self._bodies = bodies
        self._content: bytes | None = None

    async def serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        if self._content is None:
            self._content = await asyncio.to_thread(self._encoded)
        await reply.content(200, self._content, "application/json")

    def _encoded(self) -> bytes:
        return encode(description({**self._beside, **self._routes}, self._bodies)).encode()


def description(routes: Routes, bodies: Mapping[str, type[BodyObject]]) -> dict[str, Any]:
    """The whole document. Unknown fields of bodies are taken, so that their schemas allow them."""
    kinds = sorted({*bodies.values()}, key=lambda kind: kind.__name__)
    references, held = models_json_schema([(kind, "validation") for kind in kinds], ref_template=SCHEMAS + "{model}")
    schemas = held["$defs"] | {"Error": _form(HttpError(400, "").body)}
    for kind in kinds:
        schemas[references[kind, "validation"]["$ref"].removeprefix(SCHEMAS)].pop("additionalProperties", None)
    paths = {
        path: {
            method.lower(): _operation(path, bodies.get(path) if method == "POST" else None, references)
            for method in methods
        }
        for path, (methods, _) in sorted(routes.items())
    }
    return {
        "openapi": DIALECT,
        "info": {"title": "tandem", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],  # only where the gateway has one
    }


def _operation(path: str, body: type[BodyObject] | None, references: Mapping[Any, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": f"{SCHEMAS}Error"}}}
    good: dict[str, Any] = {"description": "the answer"}
    operation: dict[str, Any] = {"responses": {"200": good, "default": {"description": "an error", "content": error}}}
    if path.endswith(NAMED):
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if body is not None:
        schema = references[body, "validation"]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        kinds = ["application/json", *(["text/event-stream"] if STREAM in body.model_fields else [])]
        good["content"] = {kind: {} for kind in kinds}
    return operation


def _form(value: Any) -> dict[str, Any]:
    """The schema of objects with the keys of this one."""
    if not isinstance(value, dict):
        return {}
    return {"type": "object", "properties": {key: _form(one) for key, one in value.items()}, "required": [*value]}
