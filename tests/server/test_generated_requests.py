"""The OpenAPI description, and requests generated from it: a share of what `scripts/fuzz_api.py` sends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema_rs
import pytest
from fuzz_api import SERVER_OPTIONS, fault, fuzz, wait_healthy
from make_openapi import openapi_document
from real_process import ServerProcess

from pyllama.server.app import ROUTES
from pyllama.server.router.app import OWN_ROUTES

SHARE = 250


@pytest.fixture(scope="module")
def server(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    pytest.importorskip("pyllama._engine", reason="needs the native module")
    folder = tmp_path_factory.mktemp("generated")
    process = ServerProcess(folder, "-m", str(tiny_llama_path), "--slot-save-path", str(folder), *SERVER_OPTIONS)
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()


@pytest.mark.parametrize("router", [False, True])
def test_the_description_has_every_route_once_and_valid_schemas(router: bool) -> None:
    document = openapi_document(router=router)
    operations = [(path, method, op) for path, item in document["paths"].items() for method, op in item.items()]
    described = {(method.upper(), path) for path, method, _ in operations}
    routes = {(method, path) for method, path, _ in (OWN_ROUTES if router else ROUTES)}
    assert described <= routes
    names = [operation["operationId"] for _, _, operation in operations]
    assert len(names) == len(set(names))
    for _, _, operation in operations:
        body = operation.get("requestBody")
        if body is not None:
            jsonschema_rs.meta.validate(body["content"]["application/json"]["schema"])


def test_generated_requests_get_no_failure_of_the_servers_own(server: ServerProcess) -> None:
    report = fuzz(server.url, SHARE, seed=3)
    assert report.failures == {}
    assert report.n_requests > SHARE / 2
    assert report.statuses[200] > report.n_requests / 10
    assert report.statuses[400] > report.n_requests / 10
    wait_healthy(server.url)
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("status", "content", "is_fault"),
    [
        (200, b"{}", False),
        (400, b'{"error":{"code":400,"message":"m","type":"invalid_request_error"}}', False),
        (500, b'{"error":{"code":500,"message":"Failed to parse tools: x","type":"server_error"}}', False),
        (500, b'{"error":{"code":500,"message":"index out of range","type":"server_error"}}', True),
        (400, b'{"error":{"code":404,"message":"m","type":"invalid_request_error"}}', True),
        (400, b"no JSON", True),
        (403, b'{"error":{"message":"this feature is disabled","type":"feature_disabled"}}', False),
        (204, b"", False),
        (422, b'{"error":{"code":422,"message":"m","type":"invalid_request_error"}}', True),
    ],
)
def test_the_judge_knows_good_answers_from_bad_ones(status: int, content: bytes, is_fault: bool) -> None:
    response = httpx.Response(status, content=content, headers={"content-type": "application/json"})
    assert bool(fault(response)) is is_fault
