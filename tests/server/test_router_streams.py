"""Resumable streams through the router: kept while a model loads, handed to the child that owns them, stopped there."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from real_process import ServerProcess
from support_app import parse_events
from test_router import start_router, wait_for, wait_status

from pyllama.server.router import forward
from pyllama.server.router.pool import Pool
from support.tiny_llama import write_tiny_llama

pytest.importorskip("pyllama._engine", reason="needs the native module")

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0, "stream": True}
STREAM = "/v1/stream"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The models a and b, whose loads and requests each wait for two seconds."""
    folder = tmp_path_factory.mktemp("router")
    for seed, name in enumerate("ab", 1):
        (folder / "models").mkdir(exist_ok=True)
        write_tiny_llama(folder / "models" / f"{name}.gguf", seed=seed)
    preset = folder / "preset.ini"
    preset.write_text(f"[user/slashed]\nmodel = {folder}/models/a.gguf\n")
    process = start_router(
        folder,
        folder / "models",
        *("--models-preset", str(preset)),
        environment={"LLAMA_SERVER_DEBUG_FAKE_TIMING": "1"},
    )
    yield process
    process.close()


def unload(router: ServerProcess, name: str) -> None:
    if router.post("/models/unload", {"model": name}).status_code == 200:
        wait_status(router, name, "unloaded")


def get(router: ServerProcess, conversation: str, start: int = 0) -> httpx.Response:
    return httpx.get(router.url + STREAM, params={"conv_id": conversation, "from": start}, timeout=30)


def delete(router: ServerProcess, conversation: str) -> httpx.Response:
    return httpx.delete(router.url + STREAM, params={"conv_id": conversation}, timeout=30)


def chat(router: ServerProcess, model: str, conversation: str, **options: Any) -> httpx.Response:
    return httpx.post(
        router.url + "/v1/chat/completions",
        json={**CHAT, "model": model},
        headers={"X-Conversation-Id": conversation},
        **{"timeout": 60, **options},
    )


def looked_up(router: ServerProcess, *conversations: str) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = router.post("/v1/streams/lookup", {"conversation_ids": conversations}).json()
    return answer


@pytest.mark.contract("stream 1")
def test_a_stream_is_read_again_and_deleted_through_the_router(router: ServerProcess) -> None:
    name = "talk::user/slashed"
    sent = chat(router, "user/slashed", name)
    assert sent.status_code == 200
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in parse_events(sent.text)[:-1])
    again = get(router, name)
    assert (again.status_code, again.content) == (200, sent.content)
    assert again.headers["content-type"] == "text/event-stream"
    assert get(router, name, 10).content == sent.content[10:]
    (found,) = looked_up(router, "talk")
    assert (found["conversation_id"], found["total_bytes"], found["is_done"]) == (name, len(sent.content), True)
    assert delete(router, name).status_code == 204
    assert get(router, name).status_code == 404
    assert looked_up(router, "talk") == []
    assert get(router, "nobody").status_code == 404
    assert httpx.get(router.url + STREAM).status_code == 400


@pytest.mark.contract("stream 2")
def test_a_stream_deleted_while_its_model_loads_fails_the_request_that_waits(router: ServerProcess) -> None:
    unload(router, "a")
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(chat(router, "a", "early")))
    waiting.start()
    wait_for(lambda: looked_up(router, "early") != [])
    assert get(router, "early").status_code == 503
    assert delete(router, "early").status_code == 204
    waiting.join(10)
    assert answers[0].status_code == 400
    assert "cancelled" in answers[0].json()["error"]["message"]
    assert get(router, "early").status_code == 404


@pytest.mark.contract("stream 3")
def test_a_client_that_leaves_while_the_model_loads_finds_its_answer_later(router: ServerProcess) -> None:
    unload(router, "b")
    with pytest.raises(httpx.ReadTimeout):
        chat(router, "b", "left", timeout=0.5)
    early = get(router, "left")
    assert early.status_code == 503
    assert early.json()["error"]["message"] == "Stream owner model is loading, retry later"
    assert early.headers["retry-after"] == "1"
    wait_for(lambda: get(router, "left").status_code == 200)
    assert b"data: [DONE]" in get(router, "left").content
    unload(router, "b")  # and with the process its buffers
    assert get(router, "left").status_code == 404


def test_a_running_stream_is_stopped_in_the_child(router: ServerProcess) -> None:
    body = {"prompt": "hello", "n_predict": 100_000, "ignore_eos": True, "stream": True, "model": "a"}
    url, headers = router.url + "/completion", {"X-Conversation-Id": "endless"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        pieces = response.iter_raw()
        next(pieces)
        assert delete(router, "endless").status_code == 204
        for _ in pieces:
            pass
    slots = router.url + "/slots?model=a&autoload=0"
    wait_for(lambda: not any(slot["is_processing"] for slot in httpx.get(slots, timeout=30).json()))


def test_a_child_that_hangs_does_not_hold_up_the_word_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "ASK_SECONDS", 0.2)

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            child = SimpleNamespace(port=silent.getsockname()[1], api_key="key")
            forwarder = forward.Forwarder(Pool({}, 0, None), prefix="", autoload=True, timeout=5)  # type: ignore[arg-type]
            owner, before = forwarder.owners.open("talk", "a")
            assert before is None
            owner.child = child  # type: ignore[assignment]
            await asyncio.wait_for(forwarder.stop_stream(owner), 5)
            assert forwarder.owners.find("talk") is None
            await forwarder.close()

    asyncio.run(scene())
