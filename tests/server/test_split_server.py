"""The server with a model on several devices: the answers of one device, a start that is refused for its reason, and a
rank that fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from engine_server import EngineServer
from real_process import ServerProcess

from support.tiny_hybrid import write_tiny_hybrid

PROMPTS = ["the world is", "you and the others", "hello hello hello", "a bed of stones in the water"]
BODY = {"n_predict": 12, "temperature": 0, "cache_prompt": True}
EXACT = ("-t", "2", "-c", "2048", "-np", "2", "-ctk", "f32", "-ctv", "f32")


@pytest.fixture(scope="module")
def hybrid_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("split") / "model.gguf", n_key_head=4, n_value_head=8)


def answers(path: Path, directory: Path, *options: str) -> tuple[list[str], str]:
    server = ServerProcess(directory, "-m", str(path), *EXACT, *options)
    try:
        server.wait_ready()
        texts = [server.post("/completion", {"prompt": prompt, **BODY}).json()["content"] for prompt in PROMPTS]
        again = [server.post("/completion", {"prompt": prompt, **BODY}).json()["content"] for prompt in PROMPTS]
        assert again == texts
        return texts, server.log
    finally:
        server.close()


def test_a_server_on_several_devices_answers_like_one(hybrid_path: Path, tmp_path: Path) -> None:
    alone, _ = answers(hybrid_path, tmp_path / "alone")
    split, log = answers(hybrid_path, tmp_path / "split", "--device", "CPU0,CPU1,CPU2", "--split-mode", "tensor")
    assert split == alone
    for device in ("CPU0", "CPU1", "CPU2"):
        assert f" {device} model buffer size = " in log
    assert answers(hybrid_path, tmp_path / "layers", "-dev", "CPU0,CPU1", "-ts", "3,1")[0] == alone


def test_layers_left_to_the_host_answer_alike_and_the_log_says_what_lies_where(
    hybrid_path: Path, tmp_path: Path
) -> None:
    alone, log = answers(hybrid_path, tmp_path / "alone", "--parallel", "2")
    assert " CPU model buffer size = " in log
    assert "the model runs on the CPU: " in log or "layers to GPU" in log
    beside, log = answers(hybrid_path, tmp_path / "beside", "--device", "CPU0", "-ngl", "3", "--n-cpu-ffn", "8")
    assert beside == alone
    for line in ("CPU model buffer", "CPU0 model buffer", "CPU0 KV buffer", "CPU compute buffer", "CPU0 RS buffer"):
        assert f" {line} size = " in log


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "CPU0,CUDA31"), "device 'CUDA31' "),
        (("--device", "CPU0,CPU1", "-sm", "row"), "split mode 'row' is not supported"),
        (("-ot", "ffn_up"), "--override-tensor ffn_up: expected <tensor name pattern>=<device>"),
    ],
)
def test_a_placement_that_cannot_be_ends_the_start(
    hybrid_path: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    server = ServerProcess(tmp_path, "-m", str(hybrid_path), *options)
    try:
        assert server.wait_exit() == 1
        assert message in server.log
    finally:
        server.close()


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_a_rank_that_fails_ends_its_request_and_the_server_lives_on(hybrid_path: Path, mode: str) -> None:
    server = EngineServer(hybrid_path, "--device", "CPU0,CPU1", "--split-mode", mode)
    try:
        text = server.complete(PROMPTS[3], cache_prompt=False)["content"]
        server.state.loaded.engine_loop._engine._inject_fault(1, 30)
        begin = time.monotonic()
        answer = server.client.post("/completion", json={"prompt": PROMPTS[3], "n_predict": 8, "cache_prompt": False})
        assert time.monotonic() - begin < 2.0
        assert answer.status_code == 500
        assert "rank 1 (CPU1): injected fault" in answer.json()["error"]["message"]
        assert server.complete(PROMPTS[3], cache_prompt=False)["content"] == text
    finally:
        server.close()
