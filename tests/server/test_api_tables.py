"""The tables of endpoints and body fields tell the truth: every route has a row, every served row a route, and the
fields that a handler looks up are those of its rows.

Handlers get a body that holds, as null, every word of the server's source as a key, whose comparison notes that it was
looked up. Null is absent, so the answer is that to the required fields alone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeTokenizer
from generate_compatibility_doc import PAGE, compatibility_document, is_served
from support_app import THINKING_TEMPLATE

import pyllama.server
from pyllama.options import environment
from pyllama.server import responses
from pyllama.server.app import ROUTES
from pyllama.server.body_fields import GENERATION, BodyField
from pyllama.server.endpoints import ENDPOINTS, Endpoint
from pyllama.server.request_fields import UNSUPPORTED_FIELDS
from pyllama.server.router.app import OWN_ROUTES

Serve = Callable[..., Any]

REQUIRED: dict[str, Any] = {
    "prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a", "content": "a", "query": "a",
    "documents": ["a"], "tokens": [97], "input_prefix": "a", "input_suffix": "b", "max_tokens": 1, "filename": "a",
    "tools": [{"type": "function", "function": {"name": "f"}}], "id": "a", "action": "reasoning_end",
}  # fmt: skip

# Bodies of another form, where not every field is read with the first one.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/embeddings": ({"input": None},),
    "/embedding": ({"input": None},),
    "/v1/rerank": ({"documents": None, "texts": ["a"]},),
}

WITH_FIELDS = [endpoint for endpoint in ENDPOINTS if endpoint.fields and not endpoint.router and is_served(endpoint)]


def test_every_route_has_a_row_and_every_path_one_row() -> None:
    rows = [(route, endpoint.router) for endpoint in ENDPOINTS for route in endpoint.routes]
    assert len(rows) == len(set(rows))
    routes = {route for route, _ in rows}
    assert {(method, path) for method, path, _ in (*ROUTES, *OWN_ROUTES)} <= routes


def test_what_is_served_has_its_routes() -> None:
    own = {(method, path) for method, path, _ in OWN_ROUTES}
    served = {(method, path) for method, path, _ in ROUTES}
    for endpoint in ENDPOINTS:
        if is_served(endpoint):
            assert (own if endpoint.router else served).issuperset(endpoint.routes), endpoint.paths


def test_a_path_that_is_not_served_answers_as_its_row_says(serve: Serve) -> None:
    server = serve()
    for endpoint in ENDPOINTS:
        for method, path in endpoint.routes:
            if not is_served(endpoint):
                assert server.client.request(method, path, json={}).status_code == endpoint.status, path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/audio/transcriptions", "The current model does not support audio input."),
        ("/audio/transcriptions", "The current model does not support audio input."),
        ("/v1/systemone", "This model is not a decision model"),
    ],
)
def test_what_no_model_here_can_do_is_said_with_501(serve: Serve, path: str, message: str) -> None:
    error = {"error": {"code": 501, "message": message, "type": "not_supported_error"}}
    response = serve().client.post(path, content=b"not JSON")
    assert (response.status_code, response.json()) == (501, error)


def test_page_is_what_the_tables_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == compatibility_document(), (
        "run python scripts/generate_compatibility_doc.py"
    )


def test_names_of_fields_are_unique_within_an_endpoint() -> None:
    for endpoint in ENDPOINTS:
        names = [name for field in endpoint.fields for name in field.names]
        assert len(names) == len(set(names)), endpoint.paths


def test_variables_that_work_are_read_somewhere_and_the_others_nowhere() -> None:
    package = Path(pyllama.__file__).parent
    own = Path(environment.__file__).resolve()
    folders = (package, Path(pyllama.server.__file__).parent)
    files = {file.resolve() for folder in folders for file in folder.rglob("*.py")} - {own}
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    for variable in environment.VARIABLES:
        assert (f'"{variable.name}"' in source) is not bool(variable.no_effect), variable.name


def test_the_media_marker_can_be_given(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve().get("/props").json()["media_marker"] != serve().get("/props").json()["media_marker"]
    monkeypatch.setenv("LLAMA_MEDIA_MARKER", "<here>")
    assert serve().get("/props").json()["media_marker"] == "<here>"


def source_words() -> set[str]:
    """Every string of the server's source that could be the name of a field."""
    words: set[str] = set()
    for file in Path(pyllama.server.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                words.add(node.value)
    return words


class InfillTokenizer(FakeTokenizer):
    fim_pre_id, fim_suf_id, fim_mid_id = 1, 2, 3


class Key(str):
    """A key that notes in `seen` when it is looked up, also in copies of its dictionary."""

    __slots__ = ("seen",)

    seen: set[str]

    def __eq__(self, other: object) -> bool:
        equal = str.__eq__(self, other)
        if equal is True and type(other) is str:
            self.seen.add(str(self))
        return equal is True

    __hash__ = str.__hash__


def looked_up(serve: Serve, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """The fields that the endpoint's handler looks up."""
    needs: dict[str, Any] = {"slot_save_path": str(tmp_path)}
    if "embeddings" in endpoint.needs:
        needs["pooling"] = "mean"
    if "reranking" in endpoint.needs:
        needs["pooling"] = "rank"
    if endpoint.paths[0] == "/infill":
        needs["tokenizer_class"] = InfillTokenizer
    server = serve(template=THINKING_TEMPLATE, **needs)
    given = {name: REQUIRED[name] for field in endpoint.fields for name in field.names if name in REQUIRED}
    if endpoint.paths[0] in ("/v1/messages", "/v1/messages/count_tokens"):
        given["tools"] = [{"name": "f"}]
    if endpoint.paths[0].startswith("/v1/responses"):
        given["tools"] = [{"type": "function", "name": "f"}]
        del given["prompt"]
    seen: set[str] = set()
    body: dict[str, Any] = {}
    monkeypatch.setattr(responses, "parse_object", lambda data: body)
    path = endpoint.paths[0].replace("{id_slot}", "0") + ("?action=restore" if "slots" in endpoint.paths[0] else "")
    for variant in ({}, *VARIANTS.get(endpoint.paths[0], ())):
        values = {**given, **variant}
        body.clear()
        for word in sorted(source_words()):
            key = Key(word)
            key.seen = set()
            body[key] = values.get(word)
        for key in body:
            key.seen = seen
        answer = server.post(path, {})
        # There is no such file, but its name was read.
        assert answer.status_code == (400 if "slots" in path else 200), answer.text
    return seen


@pytest.mark.parametrize("endpoint", WITH_FIELDS, ids=lambda endpoint: endpoint.paths[0])
def test_a_handler_looks_up_the_fields_of_its_rows_and_no_others(
    serve: Serve, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = looked_up(serve, endpoint, monkeypatch, tmp_path)
    rows = {name: field for field in endpoint.fields for name in field.names}
    assert sorted(seen - set(rows)) == [], "fields without a row in server/body_fields.py"
    if "count" not in endpoint.paths[0] and "input_tokens" not in endpoint.paths[0]:
        effective = {name for name, field in rows.items() if not field.no_effect} - {"model"}
        assert sorted(effective - seen) == [], "rows of fields that nothing reads"


def refused_rows() -> list[Any]:
    return [
        pytest.param(endpoint, field, id=f"{endpoint.paths[0]} {field.name}")
        for endpoint in WITH_FIELDS
        for field in endpoint.fields
        if field.refused and not (field in GENERATION and endpoint.paths[0] != "/completion")
    ]


ACTIVE: dict[str, Any] = {
    "n_cmpl": 2, "best_of": 2, "conversation": "c", "prompt": "p", "chat_format": 1, "top_logprobs": 2,
}  # fmt: skip


@pytest.mark.parametrize(("endpoint", "field"), refused_rows())
def test_a_refused_field_that_asks_for_something_is_an_error_with_its_name(
    serve: Serve, endpoint: Endpoint, field: BodyField
) -> None:
    body = {name: REQUIRED[name] for f in endpoint.fields if f.required for name in f.names}
    kind = field.schema.get("type")
    sample = {"boolean": True, "integer": 2, "array": [{}], "object": {"a": 1}, "string": "x"}
    body[field.name] = ACTIVE[field.name] if field.name in ACTIVE else sample[str(kind)]
    if field.name in UNSUPPORTED_FIELDS:
        assert not UNSUPPORTED_FIELDS[field.name](body[field.name])
    response = serve().post(endpoint.paths[0], body)
    assert response.status_code in (400, 501), response.text
    message = response.json()["error"]["message"]
    assert field.name in message or field.name == "grammar_lazy"
