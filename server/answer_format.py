"""What a chat request says about the form of the answer: `response_format`, `json_schema`, `grammar`."""

from __future__ import annotations

from typing import Any

from pyllama.server.errors import InvalidRequest, ServerFault
from pyllama.server.generation_params import GenerationParams
from pyllama.server.json_codec import type_name
from pyllama.server.request_fields import wrong_type


def answer_schema(body: dict[str, Any]) -> Any:
    """The JSON schema that the request asks for; None without one.

    Raises `InvalidRequest`, and `ServerFault` for a schema together with a grammar.
    """
    schema = body.get("json_schema")
    response_format = body.get("response_format")
    if isinstance(response_format, dict):
        kind = response_format.get("type", "")
        if kind == "json_object":
            inner = response_format.get("schema")
            if inner is not None or schema is None:
                schema = _response_schema(inner)
        elif kind == "json_schema":
            holder = response_format.get("json_schema")
            if holder is not None and not isinstance(holder, dict):
                raise wrong_type("response_format.json_schema", "object", holder)
            schema = _response_schema((holder or {}).get("schema"))
        elif kind not in ("", "text"):
            shown = kind if isinstance(kind, str) else type_name(kind)
            raise InvalidRequest(f'response_format type must be one of "text" or "json_object", but got: {shown}')
    if schema is not None and body.get("grammar"):
        raise ServerFault("Cannot use both json_schema and grammar")
    return schema


def follows_grammar(body: dict[str, Any], defaults: GenerationParams, *, has_tools: bool) -> bool:
    """Whether the answer keeps to the user's grammar from its first token on: then it has no thoughts and no calls.

    Raises `InvalidRequest` for a grammar together with tools.
    """
    grammar = body.get("grammar")
    if grammar and has_tools:
        raise InvalidRequest("Cannot use custom grammar constraints with tools.")
    if body.get("grammar_lazy") is True or answer_schema(body) is not None:
        return False
    return bool(grammar) or (grammar is None and defaults.grammar_source is not None)


def _response_schema(schema: Any) -> dict[str, Any]:
    """Without a schema any JSON object will do."""
    if schema is None:
        return {}
    if not isinstance(schema, dict):
        raise wrong_type("response_format.schema", "object", schema)
    return schema
