"""Many clients at once over real connections to the application with the fake engine: nothing lost, nothing foreign,
nothing left.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from fake_engine import PAGE, FakeSampler, pseudo_random_token
from support_app import parse_events


def lone_text(prompt: str, n: int) -> str:
    sampler = FakeSampler(258, temperature=0)
    history = list(prompt.encode())
    for _ in range(n):
        history.append(pseudo_random_token(history, sampler))
    return bytes(history[len(prompt) :]).decode()


@pytest.mark.parametrize("n_slots", [1, 4])
def test_eight_clients_with_random_cancels_lose_nothing_and_get_nothing_foreign(listen: Any, n_slots: int) -> None:
    server = listen(n_slots=n_slots, n_ctx=2 * PAGE, engine={"step_seconds": 0.0005})
    shared = "".join(random.Random(0).choices("abc", k=40))

    async def client(number: int) -> int:
        rng = random.Random(number)
        n_complete = 0
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            for turn in range(20):
                prompt = shared[: rng.randrange(40)] + f"client {number} turn {turn}"
                n = rng.randrange(1, 40)
                body = {"prompt": prompt, "n_predict": n, "temperature": 0, "stream": rng.random() < 0.5}
                if rng.random() < 0.3:
                    leaving = http.post("/completion", json={**body, "n_predict": 400})
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(leaving, rng.uniform(0.001, 0.02))
                    continue
                response = await http.post("/completion", json=body)
                assert response.status_code == 200
                if body["stream"]:
                    text = "".join(event["content"] for event in parse_events(response.text))
                else:
                    text = response.json()["content"]
                assert text == lone_text(prompt, n), (number, turn)
                n_complete += 1
        return n_complete

    async def all_clients() -> list[int]:
        return await asyncio.gather(*(client(number) for number in range(8)))

    completed = asyncio.run(all_clients())
    assert sum(completed) > 80
    server.wait_idle()
    assert not any(slot["is_processing"] for slot in httpx.get(server.url + "/slots").json())
    for slot in server.engine_loop.slots:
        assert slot.tokens == server.engine.tokens[slot.id]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot_at_once(listen: Any, stream: bool) -> None:
    server = listen(n_slots=1, engine={"step_seconds": 0.02}, n_ctx=8 * PAGE)
    body = json.dumps({"prompt": "x", "n_predict": 2000, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        deadline = time.monotonic() + 5
        while server.engine.n_steps < 5:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    steps_at_close = server.engine.n_steps
    server.wait_idle()
    # The step that was running, one that may have begun before the close was seen, and scheduling noise of a busy
    # machine.
    assert server.engine.n_steps - steps_at_close <= 10
    assert httpx.post(server.url + "/completion", json={"prompt": "y", "n_predict": 1}).status_code == 200


def test_a_queued_request_of_a_client_that_went_away_never_runs(listen: Any) -> None:
    server = listen(n_slots=1, engine={"step_seconds": 0.01}, n_ctx=8 * PAGE)
    long = threading.Thread(
        target=httpx.post, args=(server.url + "/completion",), kwargs={"json": {"prompt": "x", "n_predict": 60}}
    )
    long.start()
    time.sleep(0.1)
    with pytest.raises(httpx.TimeoutException):
        httpx.post(server.url + "/completion", json={"prompt": "q" * 100, "n_predict": 500}, timeout=0.1)
    long.join()
    server.wait_idle()
    assert server.engine_loop.totals.prompt_tokens == 1
    assert server.engine_loop.totals.predicted_tokens == 60


@pytest.mark.parametrize(
    "head",
    [
        b"GARBAGE\r\n\r\n",
        b"\xff\xfe\xfd\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n\xff\xfe\xfd\xfc\xfb",
        b'POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{"prompt":"\xff"}',
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
)
def test_bad_bytes_on_the_wire_get_an_error_and_the_server_lives(listen: Any, head: bytes) -> None:
    server = listen(n_slots=1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head)
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 4"), answer
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_body_that_never_arrives_ends_with_408(listen: Any) -> None:
    server = listen(n_slots=1, timeout=1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
    assert httpx.get(server.url + "/health").status_code == 200


def test_every_request_of_a_crowd_is_served_and_waits_in_order(listen: Any) -> None:
    """Known fault E12: four clients without a pause on one slot."""
    server = listen(n_slots=1, engine={"step_seconds": 0.001})
    waits: list[float] = []

    def client(number: int) -> None:
        for turn in range(15):
            began = time.monotonic()
            response = httpx.post(
                server.url + "/completion", json={"prompt": f"{number}.{turn}", "n_predict": 5}, timeout=30
            )
            assert response.status_code == 200
            waits.append(time.monotonic() - began)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(waits) == 60
    assert max(waits) < 8 * (sum(waits) / len(waits)) + 0.5
