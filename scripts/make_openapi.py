"""Print an OpenAPI 3.1 description of the server's API, made from its tables: `python scripts/make_openapi.py`.

The server does not serve it, as llama-server does not. Fuzzing reads it, and clients can be made from it. Schemas of
answers say no more than their outer form.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from generate_compatibility_doc import is_served  # noqa: E402

from pyllama import __version__  # noqa: E402
from pyllama.server.body_fields import BodyField  # noqa: E402
from pyllama.server.endpoints import ENDPOINTS, Endpoint  # noqa: E402
from pyllama.server.errors import ERRORS  # noqa: E402

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type"],
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "type": {"type": "string", "enum": sorted({name for _, _, name in ERRORS})},
                "n_prompt_tokens": {"type": "integer"},
                "n_ctx": {"type": "integer"},
            },
        }
    },
}
NULL = {"type": "null"}
BODIES = {"/lora-adapters": {"type": "array", "items": {"type": "object"}}, "/props": {"type": "object"}}
"""Of the endpoints whose body has no fields of a table."""


def openapi_document(*, router: bool = False) -> dict[str, Any]:
    """The description of the server, or of what a router answers itself, without paths behind a prefix."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        if endpoint.router == router and is_served(endpoint):
            for path in endpoint.paths:
                paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "llama-server API",
            "version": __version__,
            "description": "The HTTP API of llama-server as this server has it. An OpenAPI 3.1 description.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def body_schema(fields: tuple[BodyField, ...]) -> dict[str, Any]:
    """Of an object that holds them. A field that is required may be given by an alias or be one of two."""
    properties: dict[str, Any] = {}
    for field in fields:
        for name in field.names:
            schema = dict(field.schema) if field.required else {"anyOf": [dict(field.schema), NULL]}
            note = field.refused or field.no_effect
            properties[name] = {**schema, "description": field.help + (f" ({note})" if note else "")}
    return {
        "type": "object",
        "properties": properties,
        "required": [field.name for field in fields if field.required],
    }


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    answers: dict[str, Any] = {"application/json": {}}
    if any(field.name == "stream" for field in endpoint.fields):
        answers["text/event-stream"] = {}
    if path == "/metrics":
        answers = {"text/plain": {}}
    error = {
        "description": "what went wrong",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": answers}, "default": error}
    if (endpoint.method, path) == ("DELETE", "/v1/stream"):
        responses = {"204": {"description": "it is stopped"}, "default": error}
    operation: dict[str, Any] = {
        "summary": endpoint.purpose,
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method.lower()}{path}").strip("_"),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "integer"}}
            for name in re.findall(r"{(\w+)}", path)
        ]
        + [
            {"name": name, "in": "query", "description": what, "schema": {"type": "string"}}
            for name, what in endpoint.query
        ],
        "responses": responses,
    }
    schema = body_schema(endpoint.fields) if endpoint.fields else BODIES.get(path)
    if endpoint.method == "POST" and schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


if __name__ == "__main__":
    print(json.dumps(openapi_document(), indent=1))
