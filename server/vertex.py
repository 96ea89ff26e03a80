"""Vertex AI: with `AIP_MODE=PREDICTION` in the environment the server listens where that platform expects it, and takes
several requests of any route as the instances of one prediction.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from pyllama.server.api.info import health
from pyllama.server.errors import InvalidRequest, ServerFault, error_body
from pyllama.server.followed_stream import until_disconnect
from pyllama.server.json_codec import dump_json, parse_json
from pyllama.server.responses import json_response, read_object
from pyllama.server.settings import ServerSettings, SettingsError, VertexRoutes

MAX_INSTANCES = 128
FORMAT = "@requestFormat"
HEADERS_PASSED_ON = ("authorization", "x-api-key")
CLIENT_CLOSED = 499  # nobody reads this response


def with_vertex(settings: ServerSettings, environ: Mapping[str, str], paths: Iterable[str]) -> ServerSettings:
    """The settings as the platform wants them. paths: of all routes. Raises `SettingsError`."""
    if environ.get("AIP_MODE") != "PREDICTION":
        return settings
    port = environ.get("AIP_HTTP_PORT") or "8080"
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise SettingsError(f"AIP_HTTP_PORT: {port} is not a port")
    predict, health_path = environ.get("AIP_PREDICT_ROUTE") or "/predict", environ.get("AIP_HEALTH_ROUTE") or ""
    taken = {settings.api_prefix + path for path in paths}
    for name, path in (("AIP_PREDICT_ROUTE", predict), ("AIP_HEALTH_ROUTE", health_path)):
        if path and not re.fullmatch(r"(/[A-Za-z0-9._~:@-]+)+", path):
            raise SettingsError(f"{name}: {path} is not the path of a route")
    if predict in taken or predict == health_path:
        raise SettingsError(f"AIP_PREDICT_ROUTE: {predict} is the path of another route")
    return replace(settings, port=int(port), vertex=VertexRoutes(predict, "" if health_path in taken else health_path))


def vertex_routes(settings: ServerSettings, routes: Iterable[tuple[str, str, Any]]) -> list[BaseRoute]:
    """What the platform asks for beside the server's own routes (method, path, handler)."""
    vertex = settings.vertex
    if vertex is None:
        return []
    formats = request_formats(routes)

    async def handle(http: Request) -> Response:
        return await predict(http, formats, settings.api_prefix)

    added: list[BaseRoute] = [Route(vertex.predict, handle, methods=["POST"])]
    if vertex.health:
        added.append(Route(vertex.health, health, methods=["GET"]))
    return added


def request_formats(routes: Iterable[tuple[str, str, Any]]) -> dict[str, tuple[str, str]]:
    """`@requestFormat` -> method and path: the path itself, or its words in camel case without `/v1`.

    Where two paths have one name OpenAI's is meant; where a path has two methods, POST.
    """
    formats: dict[str, tuple[str, str]] = {}
    ordered = sorted(routes, key=lambda route: (route[0] == "POST", route[1].startswith("/v1/")))
    for method, path, _ in ordered:
        if "{" not in path:
            formats[path] = formats[camel_case(path)] = method, path
    return formats


def camel_case(path: str) -> str:
    first, *others = re.split(r"[/_-]+", path.removeprefix("/v1").strip("/"))
    return first + "".join(word.capitalize() for word in others)


async def predict(http: Request, formats: Mapping[str, tuple[str, str]], prefix: str) -> Response:
    """All instances side by side; a failed one has its error where the others have their answer."""
    instances = (await read_object(http)).get("instances")
    if not isinstance(instances, list):
        raise InvalidRequest("request body must include an array field named instances")
    if len(instances) > MAX_INSTANCES:
        raise InvalidRequest(f"instances array exceeds maximum size of {MAX_INSTANCES}")
    headers = {name: value for name in HEADERS_PASSED_ON if (value := http.headers.get(name)) is not None}
    answers: asyncio.Future[list[Any]] = asyncio.gather(
        *(_answer(http.app, prefix, formats, instance, headers) for instance in instances)
    )
    leaving = asyncio.create_task(until_disconnect(http.receive))
    either: set[asyncio.Future[Any]] = {answers, leaving}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            return Response(status_code=CLIENT_CLOSED)
        return json_response({"predictions": answers.result()})
    finally:
        leaving.cancel()
        answers.cancel()  # and with them the work: nobody waits for it


async def _answer(
    app: ASGIApp, prefix: str, formats: Mapping[str, tuple[str, str]], instance: Any, headers: dict[str, str]
) -> Any:
    try:
        (method, path), body = _inner_request(formats, instance)
    except InvalidRequest as error:
        return error_body(error)
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://instance", timeout=None) as client:
        response = await client.request(method, prefix + path, content=dump_json(body), headers=headers)
    try:
        return parse_json(response.content)
    except InvalidRequest:
        return error_body(ServerFault(f"the answer of {path} is no JSON"))


def _inner_request(formats: Mapping[str, tuple[str, str]], instance: Any) -> tuple[tuple[str, str], dict[str, Any]]:
    """Raises `InvalidRequest`."""
    if not isinstance(instance, dict):
        raise InvalidRequest("each instance must be a JSON object")
    name = instance.get(FORMAT)
    if not isinstance(name, str):
        raise InvalidRequest(f"each instance must include a string {FORMAT}")
    if name not in formats:
        raise InvalidRequest(f"no handler registered for {FORMAT}: {name}")
    body = {field: value for field, value in instance.items() if field != FORMAT}
    return formats[name], body | {"stream": False}
