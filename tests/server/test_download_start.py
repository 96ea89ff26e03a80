"""The server fetches its model: 503 while it does, then answers; a failure ends the start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from real_process import ServerProcess

from support.hub_server import Answer, HubServer, running_hub

pytest.importorskip("pyllama._engine", reason="needs the native module")

REPO = "user/tiny-GGUF"


@pytest.fixture
def hub(tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("HF_", "MODEL")):
            monkeypatch.delenv(name)
    with running_hub() as server:
        server.urls["/tiny.gguf"] = tiny_llama_path.read_bytes()
        server.repos[REPO] = {"tiny-F32.gguf": tiny_llama_path.read_bytes()}
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield server


def answer_of(process: ServerProcess) -> str:
    body = {"prompt": "hello", "n_predict": 4, "temperature": 0}
    return str(process.post("/completion", body).json()["content"])


def test_a_model_by_url_is_served_and_again_without_the_network(hub: HubServer, tmp_path: Path) -> None:
    hub.answers = [Answer(seconds_per_block=0.01)]
    first = ServerProcess(tmp_path, "-mu", hub.endpoint + "/tiny.gguf", "-c", "256", "-t", "1")
    try:
        first.wait_ready()
        text = answer_of(first)
        assert "tiny.gguf: complete" in first.log
    finally:
        first.close()
    hub.close()
    second = ServerProcess(tmp_path, "-mu", hub.endpoint + "/tiny.gguf", "--offline", "-c", "256", "-t", "1")
    try:
        second.wait_ready()
        assert answer_of(second) == text
    finally:
        second.close()


def test_a_repository_names_the_model_and_its_file_is_fetched_after_listening(hub: HubServer, tmp_path: Path) -> None:
    process = ServerProcess(tmp_path, "-hf", f"{REPO}:F32", "-c", "256", "-t", "1")
    try:
        process.wait_ready()
        (model,) = httpx.get(process.url + "/v1/models", timeout=10).json()["data"]
        assert model["id"] == f"{REPO}:F32"
        props = httpx.get(process.url + "/props", timeout=10).json()
        assert props["model_path"].endswith("/tiny-F32.gguf")
    finally:
        process.close()


def test_a_download_that_fails_ends_the_start(hub: HubServer, tmp_path: Path) -> None:
    hub.answer = Answer(status=403, body=b"")
    process = ServerProcess(tmp_path, "-hf", REPO)
    try:
        assert process.wait_exit() == 1
        assert "access denied (403)" in process.log
        assert "exiting due to model loading error" in process.log
    finally:
        process.close()
