"""The program as the harness of llama-server's own acceptance suite starts, watches and ends it."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_process import ServerProcess

from support.tiny_llama import write_tiny_llama

pytest.importorskip("pyllama._engine", reason="needs the native module")

FIXED = ("--host", "127.0.0.1", "--temp", "0.8", "--seed", "42", "--offline", "--no-ui")
SMALL = (
    *("--ctx-size", "512", "--batch-size", "32", "--ubatch-size", "32", "--parallel", "2", "--n-predict", "64"),
    *("--threads", "1", "--n-gpu-layers", "0", "--alias", "tinyllama-2", "--tags", "a,b", "--cont-batching"),
)
SETS: dict[str, tuple[str, ...]] = {
    "plain": (
        *("--slots", "--no-jinja", "--cache-ram", "100", "--no-cache-idle-slots", "--context-shift", "-fa", "on"),
        "--backend_sampling",
    ),
    "watched": ("--no-slots", "--jinja", "--metrics", "--kv-unified", "--swa-full", "-ctk", "f32", "-ctv", "f32"),
    "chats": ("--slots", "--jinja", "--reasoning-format", "none", "--reasoning", "off", "--chat-template", "chatml"),
    "vectors": ("--slots", "--jinja", "--embedding", "--pooling", "last", "--verbose", "--sleep-idle-seconds", "1"),
    "guarded": ("--slots", "--jinja", "--api-key", "key", "--cors-origins", "localhost", "--ui-mcp-proxy"),
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("name", SETS)
def test_a_server_of_the_harness_is_ready_answers_and_ends_in_time(
    tiny_llama_path: Path, tmp_path: Path, name: str
) -> None:
    headers = {"Authorization": "Bearer key"} if name == "guarded" else {}
    arguments = ("--model", str(tiny_llama_path), *FIXED, *SMALL, *SETS[name])
    process = ServerProcess(tmp_path, *arguments, port=free_port(), environment={"LLAMA_SERVER_DEBUG_FAKE_TIMING": "1"})
    answers: list[Any] = []

    def ask() -> None:
        body = {"prompt": "hello", "n_predict": 64, "ignore_eos": True, "stream": True}
        try:
            for _ in range(200):  # until the server ends
                answers.append(process.post("/completion", body, headers=headers).status_code)
        except httpx.TransportError as error:
            answers.append(error)

    try:
        deadline = time.monotonic() + 60
        while True:  # ready is what /health says
            assert process.process.poll() is None, process.log
            assert time.monotonic() < deadline
            try:
                if httpx.get(process.url + "/health", headers=headers, timeout=10).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.02)
        client = threading.Thread(target=ask)
        client.start()
        while not answers:
            time.sleep(0.02)
        process.process.send_signal(signal.SIGTERM)
        assert process.wait_exit(5) == 0
        client.join(20)
        assert answers[0] == 200
    finally:
        process.close()


def test_a_router_of_the_harness(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_tiny_llama(folder / "a.gguf", seed=1)
    arguments = (*FIXED, "--ctx-size", "1024", "--batch-size", "16", "--parallel", "1", "--n-predict", "16", "--slots")
    options = ("--jinja", "--models-dir", str(folder), "--models-max", "2", "--no-models-autoload", "--threads", "1")
    process = ServerProcess(
        tmp_path / "run", *arguments, *options, environment={"XDG_CACHE_HOME": str(tmp_path / "cache")}
    )
    try:
        process.wait_ready()
        assert httpx.get(process.url + "/health", timeout=20).status_code == 200
        refused = process.post("/v1/chat/completions", {"model": "a", "messages": [{"role": "user", "content": "x"}]})
        assert refused.status_code == 400
        assert process.post("/models/load", {"model": "a"}).json() == {"success": True}
        process.process.send_signal(signal.SIGTERM)
        assert process.wait_exit(5) == 0  # also while it loads
    finally:
        process.close()
