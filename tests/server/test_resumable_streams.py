"""Streams with `X-Conversation-Id`: they outlive their client, are read again from any byte, and end when told."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_engine import forced_text
from support_app import FakeServer, parse_events

from pyllama.server.followed_stream import FollowedStream
from pyllama.server.http_server import HttpServer
from pyllama.server.listeners import open_listeners
from pyllama.server.stream_replay import BYTES_BESIDE, MAX_ID, OffsetLost, ReplayBuffer, StreamStore, conversations_of

BODY = {"prompt": "hello", "n_predict": 40, "temperature": 0, "ignore_eos": True, "stream": True}
KEPT = {"X-Conversation-Id": "talk"}


@contextlib.contextmanager
def over_sockets(server: FakeServer) -> Iterator[httpx.Client]:
    """The application of a server that `serve` made, on a port, so that clients can come and go."""
    (listener,) = open_listeners(("127.0.0.1",), 0)
    http = HttpServer(server.app, server.settings)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listener.socket])))
    thread.start()
    try:
        with httpx.Client(base_url=listener.url, timeout=20) as client:
            yield client
    finally:
        http.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], Any], seconds: float = 10) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def looked_up(client: Any, *conversations: str) -> list[dict[str, Any]]:
    response = client.post("/v1/streams/lookup", json={"conversation_ids": list(conversations)})
    assert response.status_code == 200, response.text
    return response.json()


def text_of(events: str) -> str:
    return "".join(event["content"] for event in parse_events(events))


# ---- the routes


@pytest.mark.contract("stream 1")
def test_a_stream_can_be_read_again_and_is_gone_when_deleted(serve: Any) -> None:
    server = serve()
    first = server.post("/completion", BODY, headers={"X-Conversation-Id": "talk::user/model"})
    assert first.headers["content-type"] == "text/event-stream"
    assert text_of(first.text) == server.post("/completion", {**BODY, "stream": False}).json()["content"]
    again = server.get("/v1/stream", params={"conv_id": "talk::user/model", "from": 0})
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["content-type"] == "text/event-stream"
    assert server.get("/v1/stream", params={"conv_id": "talk"}).status_code == 404
    for _ in range(2):  # also when it is unknown
        deleted = server.client.delete("/v1/stream", params={"conv_id": "talk::user/model"})
        assert (deleted.status_code, deleted.content) == (204, b"")
    assert server.get("/v1/stream", params={"conv_id": "talk::user/model"}).status_code == 404


def test_a_stream_cut_at_any_byte_goes_on_with_the_next(serve: Any) -> None:
    text = "héllo 漢字 🌍!"
    server = serve(engine={"next_token": forced_text(text.encode())})
    body = {**BODY, "prompt": "say|", "n_predict": len(text.encode())}
    whole = server.post("/completion", body, headers=KEPT).content
    assert text_of(whole.decode()) == text
    inside = [index for index, byte in enumerate(whole) if byte >= 0x80]  # of a character
    assert len(inside) > 10
    for cut in [*range(0, len(whole), 131), *inside, len(whole)]:
        rest = server.get("/v1/stream", params={"conv_id": "talk", "from": cut})
        assert whole[:cut] + rest.content == whole
    assert server.get("/v1/stream", params={"conv_id": "talk", "from": len(whole) + 99}).content == b""


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}, {}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 5}, {}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 5}, {}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}, {}),
    ],
)
def test_streams_of_every_api_are_kept(serve: Any, path: str, body: dict[str, Any], headers: Any) -> None:
    server = serve()
    sent = server.post(path, {**body, "stream": True}, headers=KEPT)
    assert sent.status_code == 200
    assert server.get("/v1/stream", params={"conv_id": "talk"}).content == sent.content
    plain = server.post(path, body, headers={"X-Conversation-Id": "plain"})
    assert plain.json()
    assert server.get("/v1/stream", params={"conv_id": "plain"}).status_code == 404


def test_bad_questions_are_refused(serve: Any) -> None:
    server = serve()
    server.post("/completion", BODY, headers=KEPT)
    assert server.get("/v1/stream").status_code == 400
    assert server.client.delete("/v1/stream").status_code == 400
    for offset in ("x", "-1", "1.5", "1" * 30):
        response = server.get("/v1/stream", params={"conv_id": "talk", "from": offset})
        assert response.status_code == 400
        assert "Invalid 'from' offset" in response.json()["error"]["message"]
    for value in ("talk", 5, [1], ["x"] * 2000):
        response = server.post("/v1/streams/lookup", {"conversation_ids": value})
        assert response.status_code == 400
        assert "conversation_ids" in response.json()["error"]["message"]


@pytest.mark.contract("own 31")
def test_a_lookup_finds_the_streams_of_a_conversation(serve: Any) -> None:
    server = serve()
    before = int(time.time())
    sizes = {
        name: len(server.post("/completion", BODY, headers={"X-Conversation-Id": name}).content)
        for name in ("a", "a::one", "a::two", "ab", "b")
    }
    assert looked_up(server.client) == []
    assert looked_up(server.client, "nobody") == []
    found = looked_up(server.client, "a", "a::one", "b")
    assert [stream["conversation_id"] for stream in found] == ["a", "a::one", "a::two", "b"]
    for stream in found:
        assert list(stream) == ["conversation_id", "is_done", "total_bytes", "started_at", "completed_at"]
        assert stream["is_done"] is True
        assert stream["total_bytes"] == sizes[stream["conversation_id"]]
        assert before <= stream["started_at"] <= stream["completed_at"] <= time.time()


def test_a_request_that_fails_leaves_no_stream_and_an_ordinary_error(serve: Any) -> None:
    server = serve(n_ctx=256)
    assert server.post("/completion", {**BODY, "prompt": [5] * 300}, headers=KEPT).status_code == 400
    server.engine.fails = RuntimeError("broken")
    response = server.post("/completion", {**BODY, "prompt": "other"}, headers=KEPT)
    assert response.status_code in (200, 500)
    if response.status_code == 200:  # it had begun: the error is the last event, and stays readable
        assert "error" in parse_events(response.text)[-1]
        assert server.get("/v1/stream", params={"conv_id": "talk"}).content == response.content
    else:
        assert looked_up(server.client, "talk") == []


def test_with_a_key_streams_need_it(serve: Any) -> None:
    server = serve(api_keys=("secret",))
    assert server.get("/v1/stream?conv_id=talk").status_code == 401
    assert server.post("/v1/streams/lookup", {}).status_code == 401


# ---- clients that come and go


def test_a_generation_goes_on_without_its_client(serve: Any) -> None:
    server = serve(engine={"step_seconds": 0.005})
    with over_sockets(server) as client:
        whole = client.post("/completion", json=BODY).content
        with client.stream("POST", "/completion", json=BODY, headers=KEPT) as response:
            begin = next(response.iter_raw())
        with client.stream("GET", "/v1/stream", params={"conv_id": "talk", "from": len(begin)}) as response:
            rest = b"".join(response.iter_raw())  # while it is being made
        assert text_of((begin + rest).decode()) == text_of(whole.decode())
        (found,) = looked_up(client, "talk")
        assert (found["is_done"], found["total_bytes"]) == (True, len(begin) + len(rest))


def test_a_generation_that_waits_in_the_queue_outlives_its_client(serve: Any) -> None:
    server = serve(n_slots=1, engine={"step_seconds": 0.005})
    with over_sockets(server) as client, client.stream("POST", "/completion", json={**BODY, "n_predict": 60}) as busy:
        running = busy.iter_raw()  # it must stay alive: a forgotten one closes the connection
        next(running)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/completion", json=BODY, headers=KEPT, timeout=0.05)
        b"".join(running)
        (found,) = wait_for(lambda: [stream for stream in looked_up(client, "talk") if stream["is_done"]])
        assert found["total_bytes"] > 0


@pytest.mark.contract("own 20")
def test_a_deleted_stream_ends_its_generation_and_its_readers(serve: Any) -> None:
    server = serve(engine={"step_seconds": 0.005})
    with over_sockets(server) as client:
        with client.stream("POST", "/completion", json={**BODY, "n_predict": 900}, headers=KEPT) as response:
            pieces = response.iter_raw()
            next(pieces)
            assert client.delete("/v1/stream", params={"conv_id": "talk"}).status_code == 204
            b"".join(pieces)
        wait_for(lambda: server.engine_loop.n_busy == 0)
        assert client.get("/v1/stream", params={"conv_id": "talk"}).status_code == 404


def test_a_stream_deleted_in_the_queue_says_so(serve: Any) -> None:
    server = serve(n_slots=1, engine={"step_seconds": 0.005})
    answers: list[httpx.Response] = []
    with over_sockets(server) as client, client.stream("POST", "/completion", json={**BODY, "n_predict": 900}) as busy:
        running = busy.iter_raw()
        next(running)
        waiting = threading.Thread(
            target=lambda: answers.append(client.post("/completion", json=BODY, headers={"X-Conversation-Id": "later"}))
        )
        waiting.start()
        wait_for(lambda: looked_up(client, "later"))
        assert client.delete("/v1/stream", params={"conv_id": "later"}).status_code == 204
        waiting.join(10)
        assert (answers[0].status_code, "cancelled" in answers[0].text) == (400, True)


def test_a_new_request_of_the_conversation_ends_the_old_one(serve: Any) -> None:
    server = serve(engine={"step_seconds": 0.005})
    with over_sockets(server) as client:
        with client.stream("POST", "/completion", json={**BODY, "n_predict": 900}, headers=KEPT) as old:
            pieces = old.iter_raw()
            next(pieces)
            new = client.post("/completion", json=BODY, headers=KEPT)
            b"".join(pieces)
        assert client.get("/v1/stream", params={"conv_id": "talk"}).content == new.content
        wait_for(lambda: server.engine_loop.n_busy == 0)


def test_the_server_ends_in_the_middle_of_a_kept_stream(serve: Any) -> None:
    server = serve(engine={"step_seconds": 0.005})
    with over_sockets(server) as client:
        with client.stream("POST", "/completion", json={**BODY, "n_predict": 900}, headers=KEPT) as response:
            next(response.iter_raw())
        started = time.monotonic()
    assert time.monotonic() - started < 5


# ---- buffers and their bounds


def test_a_buffer_keeps_the_newest_bytes_only() -> None:
    buffer = ReplayBuffer(max_bytes=10)
    buffer.append(b"0123456789")
    buffer.append(b"abc")
    assert (buffer.n_total, buffer.n_kept) == (13, 10)
    assert buffer.read(3) == b"3456789abc"
    assert buffer.read(13) == b""
    with pytest.raises(OffsetLost, match="Stream offset lost, please restart"):
        buffer.read(2)
    with pytest.raises(OffsetLost):
        FollowedStream(buffer, 0)
    buffer.append(b"x" * 100)
    assert (buffer.n_total, buffer.n_kept) == (113, 10)


async def messages_of(response: FollowedStream, on_send: Callable[[bytes], None] = lambda data: None) -> list[bytes]:
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            on_send(message["body"])

    async def receive() -> Any:
        await asyncio.Event().wait()

    await response({}, receive, send)
    return bodies


def test_a_reader_that_falls_behind_is_told_so() -> None:
    async def scene() -> list[bytes]:
        buffer = ReplayBuffer(max_bytes=10)
        buffer.append(b"data: 1")

        def run_away(data: bytes) -> None:
            if data == b"data: 1":
                buffer.append(b"x" * 50)

        return await asyncio.wait_for(messages_of(FollowedStream(buffer), run_away), 5)

    assert b"Stream offset lost, please restart" in asyncio.run(scene())[-1]


def test_a_stream_is_found_under_every_conversation_it_belongs_to() -> None:
    assert conversations_of("a") == ["a"]
    assert conversations_of("a::b/c::d") == ["a::b/c::d", "a::b/c", "a"]


def test_an_id_that_is_too_long_is_refused(serve: Any) -> None:
    server = serve()
    for length, status in ((MAX_ID, 200), (MAX_ID + 1, 400)):
        assert server.post("/completion", BODY, headers={"X-Conversation-Id": "x" * length}).status_code == status


def test_finished_streams_are_forgotten_after_their_time_and_for_want_of_room() -> None:
    async def scene() -> None:
        store = StreamStore(seconds_after_end=0.05, bytes_of_finished=2 * (10 + 1 + BYTES_BESIDE))
        running = store.open("running", lambda: None)
        running.buffer.append(b"x" * 100)
        for name in ("a", "b", "c"):
            stream = store.open(name, lambda: None)
            stream.buffer.append(b"x" * 10)
            store.has_ended(stream)
        assert [stream.conversation for stream in store.matching(["a", "b", "c"])] == ["b", "c"]
        store.end("b")
        again = store.open("b", lambda: None)  # its own time has not begun
        again.buffer.append(b"x")
        await asyncio.sleep(0.2)
        assert store.matching(["a", "b", "c"]) == [again]
        store.has_ended(again)
        store.has_ended(again)
        assert store.matching(["b"]) == [again]
        await asyncio.sleep(0.2)
        assert store.matching(["b"]) == []
        assert store.find("running") is running

    asyncio.run(scene())
