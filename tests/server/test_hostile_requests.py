"""A thousand hostile requests to the server as a process: never a failure of its own, no memory kept, and an honest
client beside them sees nothing of it.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fuzz_api import fault
from hostile_requests import HEADS, HostileRequest, hostile_requests
from real_process import ServerProcess
from support_app import parse_events

pytest.importorskip("pyllama._engine", reason="needs the native module")

COUNT = 1000
SEED = 7


@pytest.fixture(scope="module")
def server(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("hostile")
    process = ServerProcess(
        folder, "-m", str(tiny_llama_path), "-t", "1", "-c", "4096", "-np", "3", "-n", "24", "--cache-ram", "8",
        "--embeddings", "--pooling", "mean", "--metrics", "--props", "--slot-save-path", str(folder),
    )  # fmt: skip
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()


def resident_mib(server: ServerProcess) -> float:
    status = Path(f"/proc/{server.process.pid}/status")
    if not status.exists():
        pytest.skip("needs /proc to see the memory of another process")
    found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
    assert found is not None
    return int(found[1]) / 1024


class HonestClient(threading.Thread):
    """Asks the same question again and again, streamed, and keeps what it gets."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.texts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.is_done = threading.Event()

    def run(self) -> None:
        while not self.is_done.is_set():
            try:
                self.texts[self.ask()] += 1
            except (httpx.HTTPError, AssertionError, KeyError) as error:
                self.faults.append(repr(error))

    def ask(self) -> str:
        body = {"prompt": "An honest question: ", "n_predict": 20, "temperature": 0, "ignore_eos": True, "stream": True}
        response = httpx.post(f"{self.url}/completion", json=body, timeout=60)
        assert response.status_code == 200, response.text
        events = parse_events(response.text)
        assert events[-1]["stop"] is True
        return "".join(event["content"] for event in events)


def send_all(client: httpx.Client, requests: list[HostileRequest]) -> list[str]:
    """What was wrong with the answers."""
    faults = []
    for request in requests:
        response = client.request(request.method, request.path, content=request.content)
        if reason := fault(response):
            faults.append(f"{request.why}: {reason}")
    return faults


def test_a_thousand_hostile_requests_harm_neither_the_server_nor_an_honest_client(server: ServerProcess) -> None:
    requests = hostile_requests(COUNT, SEED)
    assert len(requests) == COUNT
    honest = HonestClient(server.url)
    expected = honest.ask()
    honest.start()
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            faults = send_all(client, requests[: COUNT // 2])
            before = resident_mib(server)
            faults += send_all(client, requests[COUNT // 2 :])
            after = resident_mib(server)
    finally:
        honest.is_done.set()
        honest.join()
    assert faults == []
    assert honest.faults == []
    assert set(honest.texts) == {expected}
    assert honest.texts[expected] > 3
    # Every kind of request came in the first half too; what stays are free pieces of the heap.
    assert after - before < 32, f"{before:.0f} MiB after one half, {after:.0f} MiB after the other"
    server.wait_idle()
    assert "Traceback" not in server.log
    assert httpx.get(server.url + "/health", timeout=10).status_code == 200


def test_heads_and_framing_that_are_not_http_end_their_connection_only(server: ServerProcess) -> None:
    port = int(server.url.rpartition(":")[2])
    for head in HEADS:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            try:
                connection.sendall(head)
                connection.shutdown(socket.SHUT_WR)
                received = connection.recv(1 << 16)
            except OSError:  # closed while the client was still sending
                received = b""
        status = re.match(rb"HTTP/1\.[01] (\d{3})", received)
        assert status is None or not status[1].startswith(b"5") or status[1] in (b"501", b"503"), (head[:80], received)
        assert status is not None or received == b"", (head[:80], received[:80])
    server.wait_idle()
    assert "Traceback" not in server.log
    began = time.monotonic()
    assert httpx.get(server.url + "/health", timeout=10).status_code == 200
    assert time.monotonic() - began < 5
