"""LoRA adapters and control vectors in the server, on the real engine: scales of server and requests, requests of
different scales at once, prompts that are reused only under the scales they were computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import EngineServer

from support.adapters import random_matrices, write_adapter, write_control_vector
from support.tiny_llama import write_tiny_llama

pytest.importorskip("pyllama._engine", reason="needs the native module")

PROMPT = "the world is the hello of all you and the rest " * 8
F32 = np.float32


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Path]:
    """Model, two adapters, control vector."""
    folder = tmp_path_factory.mktemp("lora")
    model = write_tiny_llama(folder / "model.gguf", n_layer=3)

    def is_adapted(name: str) -> bool:
        return name.startswith("blk.") and "norm" not in name

    first = write_adapter(
        folder / "first.gguf",
        random_matrices(model, is_adapted),
        keys={"adapter.lora.task_name": "classify", "adapter.lora.prompt_prefix": "Label: "},
    )
    second = write_adapter(folder / "second.gguf", random_matrices(model, is_adapted, seed=9))
    direction = np.random.default_rng(1).standard_normal(64)
    return model, first, second, write_control_vector(folder / "control.gguf", {1: direction, 2: -direction})


@pytest.fixture
def start(files: tuple[Path, ...]) -> Iterator[Callable[..., EngineServer]]:
    servers: list[EngineServer] = []

    def start_one(*arguments: str) -> EngineServer:
        servers.append(EngineServer(files[0], *arguments))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


def lora(*scales: float) -> list[dict[str, Any]]:
    return [{"id": index, "scale": scale} for index, scale in enumerate(scales)]


def text(server: EngineServer, *scales: float, prompt: str = PROMPT, **fields: Any) -> str:
    return str(server.complete(prompt, lora=lora(*scales), n_predict=16, **fields)["content"])


def test_the_list_of_adapters_and_their_scales(start, files):
    server = start("--lora", str(files[1]), "--lora-scaled", f"{files[2]}:0.25")
    assert server.client.get("/lora-adapters").json() == [
        {"id": 0, "path": str(files[1]), "scale": 1.0, "task_name": "classify", "prompt_prefix": "Label: "},
        {"id": 1, "path": str(files[2]), "scale": 0.25, "task_name": "", "prompt_prefix": ""},
    ]
    assert server.client.post("/lora-adapters", json=[{"id": 1, "scale": 0.3}]).json() == {"success": True}
    scales = [adapter["scale"] for adapter in server.client.get("/lora-adapters").json()]
    assert scales == [0.0, float(F32(0.3))]
    answer = server.complete("hello")
    assert answer["generation_settings"]["lora"] == lora(*scales)
    answer = server.complete("hello", lora=[{"id": 0, "scale": 2}])
    assert answer["generation_settings"]["lora"] == lora(2.0, 0.0)


def test_adapters_come_in_the_order_of_the_command_line(start, files):
    server = start("--lora-scaled", f"{files[2]}:0.5", "--lora", f"{files[1]},{files[2]}")
    found = [(adapter["path"], adapter["scale"]) for adapter in server.client.get("/lora-adapters").json()]
    assert found == [(str(files[2]), 0.5), (str(files[1]), 1.0), (str(files[2]), 1.0)]


@pytest.mark.contract("lora 1")
def test_the_scales_of_the_server_are_those_of_requests_without_their_own(start, files):
    server = start("--lora", str(files[1]), "--lora-init-without-apply")
    plain, adapted = text(server, 0.0), text(server, 1.0)
    assert plain != adapted
    assert server.complete(PROMPT, n_predict=16)["content"] == plain
    server.client.post("/lora-adapters", json=lora(1.0))
    assert server.complete(PROMPT, n_predict=16)["content"] == adapted
    assert text(server) == plain, "a request that lists none applies none"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    answers = [
        server.client.post("/v1/chat/completions", json={**chat, **fields}).json()["choices"][0]["message"]["content"]
        for fields in ({}, {"lora": lora(1.0)}, {"lora": []})
    ]
    assert answers[0] == answers[1] != answers[2]
    server.client.post("/lora-adapters", json=[])
    assert server.complete(PROMPT, n_predict=16)["content"] == plain


@pytest.mark.contract("lora 2")
def test_requests_of_different_scales_at_once_get_what_each_gets_alone(start, files):
    server = start("--lora", str(files[1]), "-np", "4", "-c", "4096")
    scales = (0.0, 0.0, 0.3, 0.7, 1.0, 1.0)
    fields = {"cache_prompt": False, "n_predict": 24}

    def run(scale: float) -> str:
        return str(server.complete(PROMPT, lora=lora(scale), **fields)["content"])

    alone = [run(scale) for scale in scales]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(6) as pool:
        for _ in range(2):
            assert list(pool.map(run, scales)) == alone
        fields = {"n_predict": 24}  # and with prompts that are reused
        for _ in range(3):
            assert list(pool.map(run, scales)) == alone


def test_prompts_are_reused_under_the_same_scales_only(start, files):
    server = start("--lora", str(files[1]), "-np", "1")
    first = server.complete(PROMPT, lora=lora(0.5))
    assert first["timings"]["cache_n"] == 0
    for scale in (1.0, 0.0):
        assert server.complete(PROMPT, lora=lora(scale))["timings"]["cache_n"] == 0, scale
    for scale in (0.5, 1.0, 0.0):  # from host memory
        again = server.complete(PROMPT, lora=lora(scale))
        assert again["timings"]["cache_n"] == first["tokens_evaluated"] - 1, scale
    assert server.complete(PROMPT, lora=lora(0.5))["content"] == first["content"]
    plain = start("-np", "1")
    assert server.complete(PROMPT, lora=[])["content"] == plain.complete(PROMPT)["content"]


def test_choices_of_one_prompt_share_its_adapters(start, files):
    server = start("--lora", str(files[1]), "-np", "3", "-c", "4096")
    for prompt in (PROMPT, "h"):
        alone = text(server, 1.0, prompt=prompt)
        answer = server.complete(prompt, lora=lora(1.0), n_predict=16, n_cmpl=3)
        assert [part["content"] for part in answer] == [alone] * 3
        assert text(server, 0.0, prompt=prompt) != alone


def test_a_slot_file_brings_its_scales_along(files, tmp_path):
    arguments = ("--lora", str(files[1]), "--slot-save-path", str(tmp_path))
    server = EngineServer(files[0], *arguments)
    first = server.complete(PROMPT, 0, lora=lora(0.5))
    server.act(0, "save", filename="a.bin")
    server.close()
    server = EngineServer(files[0], *arguments)
    assert server.act(1, "restore", filename="a.bin").status_code == 200
    assert server.complete(PROMPT, 1, lora=lora(1.0), n_predict=0)["timings"]["cache_n"] == 0
    server.act(1, "restore", filename="a.bin")
    again = server.complete(PROMPT, 1, lora=lora(0.5))
    assert (again["content"], again["timings"]["cache_n"]) == (first["content"], first["tokens_evaluated"] - 1)
    server.close()
    server = EngineServer(files[0], *arguments[2:])
    refused = server.act(0, "restore", filename="a.bin")
    assert refused.status_code == 400
    assert "LoRA adapter that is not loaded" in refused.json()["error"]["message"]
    server.close()


def test_embeddings_are_those_of_the_servers_scales(start, files):
    server = start("--lora", str(files[1]), "--embeddings", "--pooling", "mean")

    def embedding() -> list[float]:
        body = server.client.post("/v1/embeddings", json={"input": "hello world"}).json()
        return list(body["data"][0]["embedding"])

    adapted = embedding()
    server.client.post("/lora-adapters", json=[])
    plain = embedding()
    assert plain != adapted
    server.client.post("/lora-adapters", json=lora(1.0))
    assert embedding() == adapted
    assert (
        start("--embeddings", "--pooling", "mean")
        .client.post("/v1/embeddings", json={"input": "hello world"})
        .json()["data"][0]["embedding"]
        == plain
    )


@pytest.mark.parametrize(
    "value",
    [
        7,
        {"id": 0, "scale": 1},
        [1],
        [{"scale": 1.0}],
        [{"id": 1, "scale": 1.0}],
        [{"id": -1, "scale": 1.0}],
        [{"id": True, "scale": 1.0}],
        [{"id": 0.5, "scale": 1.0}],
        [{"id": 0, "scale": "x"}],
        [{"id": 0, "scale": 1e300}],
        [{"id": 0, "scale": None}],
    ],
)
def test_scales_that_mean_nothing_are_refused(start, files, value):
    server = start("--lora", str(files[1]))
    for response in (
        server.client.post("/completion", json={"prompt": "a", "n_predict": 1, "lora": value}),
        server.client.post("/lora-adapters", json=value),
    ):
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert server.client.get("/lora-adapters").json()[0]["scale"] == 1.0


def test_control_vectors_steer_every_answer(start, files):
    plain = start().complete(PROMPT, n_predict=16)["content"]
    steered = start("--control-vector-scaled", f"{files[3]}:2").complete(PROMPT, n_predict=16)["content"]
    same = start("--control-vector", f"{files[3]},{files[3]}").complete(PROMPT, n_predict=16)["content"]
    none = start("--control-vector", str(files[3]), "--control-vector-layer-range", "3", "9")
    assert steered == same != plain
    assert none.complete(PROMPT, n_predict=16)["content"] == plain


def test_adapters_outlast_a_sleep(files):
    server = EngineServer(files[0], "--lora", str(files[1]), "--sleep-idle-seconds", "1")
    first = text(server, 1.0)
    engine_loop = server.state.loaded.engine_loop
    for _ in range(200):
        if engine_loop.is_sleeping:
            break
        engine_loop._thread.join(0.05)
    assert engine_loop.is_sleeping
    assert text(server, 1.0) == first
    server.close()
