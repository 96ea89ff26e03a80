"""Vertex AI: `AIP_MODE=PREDICTION` moves the server and adds `/predict`, which takes several requests at once."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_process import ServerProcess

from pyllama.server.app import ROUTE_PATHS, ROUTES
from pyllama.server.settings import ServerSettings, SettingsError, VertexRoutes
from pyllama.server.vertex import MAX_INSTANCES, request_formats, with_vertex

CHAT = {"@requestFormat": "chatCompletions", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ON = {"AIP_MODE": "PREDICTION"}


@pytest.mark.contract("gcp 1", "gcp 2")
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_instances_are_answered_in_their_order(serve: Any, n: int) -> None:
    server = serve(vertex=VertexRoutes("/predict"))
    instances = [{**CHAT, "max_tokens": 3 + index, "stream": True, "temperature": 0} for index in range(n)]
    response = server.post("/predict", {"instances": instances})
    assert response.status_code == 200
    predictions = response.json()["predictions"]
    assert [prediction["usage"]["completion_tokens"] for prediction in predictions] == [3 + i for i in range(n)]
    for prediction, instance in zip(predictions, instances, strict=True):
        body = {name: value for name, value in instance.items() if name not in ("@requestFormat", "stream")}
        plain = server.post("/v1/chat/completions", body).json()
        assert prediction["choices"] == plain["choices"]
        assert prediction["choices"][0]["message"]["role"] == "assistant"
        assert prediction["choices"][0]["message"]["content"]


def test_every_route_has_its_path_and_a_name_in_camel_case() -> None:
    formats = request_formats(ROUTES)
    assert formats["chatCompletions"] == formats["/v1/chat/completions"] == ("POST", "/v1/chat/completions")
    assert formats["applyTemplate"] == ("POST", "/apply-template")
    assert formats["chatCompletionsInputTokens"] == ("POST", "/v1/chat/completions/input_tokens")
    assert formats["completions"] == ("POST", "/v1/completions")
    assert formats["/completions"] == ("POST", "/completions")
    assert formats["props"] == ("POST", "/props")
    assert formats["health"] == ("GET", "/v1/health")
    assert not any("{" in path for _, path in formats.values())


def test_an_instance_that_fails_does_not_fail_the_others(serve: Any) -> None:
    server = serve(vertex=VertexRoutes("/predict"))
    instances = [
        {"@requestFormat": "tokenize", "content": "abc"},
        {"@requestFormat": "nobody"},
        {"content": "abc"},
        5,
        {"@requestFormat": "/completion"},
        {"@requestFormat": "metrics"},
        {"@requestFormat": "health"},
    ]
    predictions = server.post("/predict", {"instances": instances}).json()["predictions"]
    assert predictions[0] == {"tokens": list(b"abc")}
    assert predictions[6] == {"status": "ok"}
    found = [(prediction["error"]["code"], prediction["error"]["message"]) for prediction in predictions[1:6]]
    assert found[:4] == [
        (400, "no handler registered for @requestFormat: nobody"),
        (400, "each instance must include a string @requestFormat"),
        (400, "each instance must be a JSON object"),
        (400, "key 'prompt' not found"),
    ]
    assert found[4][0] == 501


@pytest.mark.parametrize("body", [{}, {"instances": None}, {"instances": {}}, {"instances": [5] * (MAX_INSTANCES + 1)}])
def test_a_body_without_usable_instances_is_refused(serve: Any, body: Any) -> None:
    response = serve(vertex=VertexRoutes("/predict")).post("/predict", body)
    assert response.status_code == 400
    assert "instances" in response.json()["error"]["message"]


def test_instances_pass_the_key_on_and_only_health_is_public(serve: Any) -> None:
    server = serve(vertex=VertexRoutes("/predict", "/alive"), api_keys=("secret",), api_prefix="/p")
    assert server.get("/alive").json() == {"status": "ok"}
    body = {"instances": [{"@requestFormat": "tokenize", "content": "a"}]}
    assert server.post("/predict", body).status_code == 401
    for headers in ({"Authorization": "Bearer secret"}, {"X-Api-Key": "secret"}):
        assert server.post("/predict", body, headers=headers).json() == {"predictions": [{"tokens": [97]}]}


def test_without_the_mode_there_is_no_such_route(serve: Any) -> None:
    settings = ServerSettings(model="m")
    assert with_vertex(settings, {"AIP_HTTP_PORT": "1", "AIP_PREDICT_ROUTE": "/x"}, ROUTE_PATHS) is settings
    assert serve().post("/predict", {"instances": []}).status_code == 404


def test_the_environment_says_where() -> None:
    settings = with_vertex(ServerSettings(model="m", port=1234), ON, ROUTE_PATHS)
    assert (settings.port, settings.vertex) == (8080, VertexRoutes("/predict"))
    given = {"AIP_HTTP_PORT": "9000", "AIP_PREDICT_ROUTE": "/v1/x:predict", "AIP_HEALTH_ROUTE": "/ok"}
    settings = with_vertex(ServerSettings(model="m"), ON | given, ROUTE_PATHS)
    assert (settings.port, settings.vertex) == (9000, VertexRoutes("/v1/x:predict", "/ok"))
    same = with_vertex(ServerSettings(model="m"), {**ON, "AIP_HEALTH_ROUTE": "/health"}, ROUTE_PATHS)
    assert same.vertex == VertexRoutes("/predict")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AIP_HTTP_PORT", "port"),
        ("AIP_HTTP_PORT", "0"),
        ("AIP_HTTP_PORT", "70000"),
        ("AIP_PREDICT_ROUTE", "predict"),
        ("AIP_PREDICT_ROUTE", "/a/{b}"),
        ("AIP_PREDICT_ROUTE", "/v1/completions"),
        ("AIP_HEALTH_ROUTE", "/predict"),
    ],
)
def test_values_that_cannot_be_are_refused(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(value)):
        with_vertex(ServerSettings(model="m"), {**ON, name: value}, ROUTE_PATHS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("is_router", [False, True])
def test_the_program_predicts_where_the_platform_asks(tiny_llama_path: Path, tmp_path: Path, is_router: bool) -> None:
    pytest.importorskip("pyllama._engine", reason="needs the native module")
    port = free_port()
    environ = {**ON, "AIP_HTTP_PORT": str(port), "AIP_HEALTH_ROUTE": "/alive", "XDG_CACHE_HOME": str(tmp_path)}
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "tiny.gguf").symlink_to(tiny_llama_path)
    model = ("--models-dir", str(folder)) if is_router else ("-m", str(tiny_llama_path))
    process = ServerProcess(tmp_path / "run", *model, "-t", "1", "-c", "512", environment=environ)
    try:
        process.wait_ready()
        assert process.url == f"http://127.0.0.1:{port}"
        assert httpx.get(process.url + "/alive", timeout=20).json() == {"status": "ok"}
        predictions = process.post(
            "/predict", {"instances": [{**CHAT, "model": "tiny", "ignore_eos": True}] * 2}
        ).json()["predictions"]
        assert [prediction["choices"][0]["finish_reason"] for prediction in predictions] == ["length"] * 2
    finally:
        process.close()


def test_a_route_that_is_taken_ends_the_start(tiny_llama_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyllama._engine", reason="needs the native module")
    process = ServerProcess(
        tmp_path, "-m", str(tiny_llama_path), environment={**ON, "AIP_PREDICT_ROUTE": "/v1/chat/completions"}
    )
    try:
        assert process.wait_exit() == 1
    finally:
        process.close()
    assert "AIP_PREDICT_ROUTE: /v1/chat/completions is the path of another route" in process.log
