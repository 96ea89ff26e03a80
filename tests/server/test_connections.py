"""Connections over real sockets: how many requests one carries, clients that stand still, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from real_process import ServerProcess
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.server import ServerState

from pyllama.options import parse_options
from pyllama.server.http_server import HttpServer
from pyllama.server.listeners import open_listeners
from pyllama.server.middleware import CorsMiddleware
from pyllama.server.settings import ServerSettings, SettingsError, settings_from_options
from pyllama.server.tls import TlsFiles

MEBIBYTE = 1 << 20
LIMIT = 0.3  # seconds


async def client_port(request: Request) -> Response:
    return Response(str(request.client.port))


async def long_answer(request: Request) -> Response:
    return Response(b"x" * (int(request.query_params["mib"]) * MEBIBYTE))


async def late_answer(request: Request) -> Response:
    await asyncio.sleep(3 * LIMIT)
    return Response("late")


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[str]:
    """A small application behind the server's HTTP side, on a thread; its URL."""
    settings = ServerSettings(model="none", **options)
    app = Starlette(
        routes=[Route("/port", client_port), Route("/long", long_answer), Route("/late", late_answer)],
        middleware=[Middleware(CorsMiddleware, settings=settings)],
    )
    (listener,) = open_listeners(("127.0.0.1",), 0, scheme=settings.scheme)
    server = HttpServer(app, settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener.socket])))
    thread.start()
    try:
        yield listener.url
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def connect(url: str) -> socket.socket:
    parts = httpx.URL(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    client.settimeout(20)
    client.connect((parts.host, parts.port))
    return client


@pytest.mark.contract("own 4")
def test_a_connection_carries_a_hundred_requests_and_says_when_it_ends() -> None:
    with serving() as url:
        parts = httpx.URL(url)
        client = http.client.HTTPConnection(parts.host, parts.port, timeout=20)
        ports = []
        for number in range(1, 102):
            client.request("GET", "/port")
            response = client.getresponse()
            ports.append(response.read())
            if number == 100:
                assert (response.getheader("connection"), response.getheader("keep-alive")) == ("close", None)
            else:
                assert response.getheader("keep-alive") == "timeout=5, max=100"
        client.close()
    assert len(set(ports[:100])) == 1
    assert ports[100] != ports[0]


def test_the_count_is_of_each_connection_alone() -> None:
    with serving() as url, httpx.Client(base_url=url) as first, httpx.Client(base_url=url) as second:
        for _ in range(60):
            assert "keep-alive" in first.get("/port").headers
            assert "keep-alive" in second.get("/port").headers


@pytest.mark.parametrize("sent", [b"", b"GET /port HTTP/1.1\r\nHost: "])
def test_a_client_that_owes_a_request_and_is_silent_is_disconnected(sent: bytes) -> None:
    with serving(timeout=LIMIT) as url, connect(url) as client:
        client.sendall(sent)
        start = time.monotonic()
        assert client.recv(1000) == b""
        assert time.monotonic() - start < 10


def test_a_head_that_stops_after_another_request_is_not_waited_for() -> None:
    with serving(timeout=LIMIT) as url, connect(url) as client:
        client.sendall(b"GET /port HTTP/1.1\r\nHost: x\r\n\r\nGET /po")
        answer = b""
        while data := client.recv(1000):
            answer += data
        assert answer.count(b"HTTP/1.1 200") == 1


def test_a_request_that_computes_for_longer_than_the_limit_is_answered() -> None:
    with serving(timeout=LIMIT) as url:
        assert httpx.get(url + "/late", timeout=20).text == "late"


@contextlib.contextmanager
def heard(text: str) -> Iterator[threading.Event]:
    """Is set when the server logs a line with that text."""
    event = threading.Event()
    log = logging.getLogger("pyllama.server.srv")

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                event.set()

    listener = Listener()
    log.addHandler(listener)
    try:
        yield event
    finally:
        log.removeHandler(listener)


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    with heard("took no byte of its answer") as is_cut_off, serving(timeout=LIMIT) as url, connect(url) as idle:
        idle.sendall(b"GET /long?mib=64 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert is_cut_off.wait(20)
        n_taken = 0
        with contextlib.suppress(ConnectionResetError):
            while data := idle.recv(MEBIBYTE):
                n_taken += len(data)
        assert n_taken < 64 * MEBIBYTE


class Timers:
    """An event loop's timers, whose time passes on demand."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, Any, Mock]] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> Mock:
        handle = Mock()
        self._waiting.append((self.now + delay, callback, handle))
        return handle

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self._waiting if timer[0] <= self.now]
        self._waiting = [timer for timer in self._waiting if timer[0] > self.now]
        for _, callback, handle in due:
            if not handle.cancel.called:
                callback()


def test_a_client_that_takes_something_within_each_limit_is_served_on() -> None:
    config = HttpServer(Starlette(), ServerSettings(model="none", timeout=10)).config
    config.load()
    timers, transport = Timers(), Mock()
    connection: Any = config.http_protocol_class(config, ServerState(), {}, timers)
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\n")
    connection.cycle = Mock(response_complete=False)  # an answer is owed
    transport.get_write_buffer_size.return_value = n_unsent = 1000
    connection.pause_writing()
    for _ in range(20):
        timers.pass_seconds(9)
        n_unsent -= 1
        transport.get_write_buffer_size.return_value = n_unsent
        timers.pass_seconds(1)
    connection.resume_writing()
    timers.pass_seconds(100)
    connection.pause_writing()
    timers.pass_seconds(9)
    transport.abort.assert_not_called()
    timers.pass_seconds(1)
    transport.abort.assert_called_once()
    transport.close.assert_not_called()


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /", b"a" * 4096),
        (b"GET /port HTTP/1.1\r\nX: ", b"a" * 4096),
        (b"GET /port HTTP/1.1\r\n", b"a" * 4096),
        (b"GET /port HTTP/1.1\r\n", b"a: b\r\n" * 512),
    ],
)
def test_an_endless_head_is_refused(begin: bytes, more: bytes) -> None:
    with serving() as url, connect(url) as client:
        client.sendall(begin)
        n_sent = 0
        with contextlib.suppress(ConnectionError):
            while n_sent < 32 * MEBIBYTE:
                client.sendall(more)
                n_sent += len(more)
        assert n_sent < 32 * MEBIBYTE
        assert httpx.get(url + "/port", timeout=20).status_code == 200


def test_a_large_head_is_answered_and_a_larger_one_is_told_why() -> None:
    with serving() as url:
        headers = {f"x-{number}": "a" * 8000 for number in range(100)}
        for _ in range(2):
            assert httpx.get(url + "/port", headers=headers, timeout=20).status_code == 200
        with connect(url) as client:
            client.sendall(b"GET /port HTTP/1.1\r\nX: " + b"a" * (MEBIBYTE - 4000))
            time.sleep(0.2)
            client.sendall(b"a" * 8000)
            answer = b""
            while data := client.recv(1000):
                answer += data
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"the head of the request is larger than 1048576 bytes" in answer


# ---- TLS


def make_pair(folder: Path, name: str, *key_options: str) -> TlsFiles:
    """A key and a certificate for 127.0.0.1, signed by itself."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", str(key), "-out", str(certificate), *(key_options or ("-nodes",))),
        ],
        check=True,
        capture_output=True,
    )
    return TlsFiles(str(key), str(certificate))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program makes the certificate")
    return make_pair(tmp_path_factory.mktemp("tls"), "server")


def trusting(pair: TlsFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=pair.certificate)


def test_requests_over_tls_are_answered_and_plain_ones_are_not(pair: TlsFiles) -> None:
    with serving(tls=pair) as url:
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=trusting(pair), timeout=20) as client:
            assert client.get(url + "/port").headers["keep-alive"] == "timeout=5, max=100"
            assert len(client.get(url + "/long?mib=4").content) == 4 * MEBIBYTE
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url + "/port", timeout=20)
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http") + "/port", timeout=20)
        assert httpx.get(url + "/port", verify=trusting(pair), timeout=20).status_code == 200


@pytest.mark.contract("own 7")
def test_the_program_serves_its_api_over_tls(pair: TlsFiles, tiny_llama_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyllama._engine", reason="needs the native module")
    files = ("--ssl-key-file", pair.key, "--ssl-cert-file", pair.certificate)
    process = ServerProcess(tmp_path, "-m", str(tiny_llama_path), "-c", "512", "-t", "1", *files)
    try:
        process.wait_ready()
        assert process.url.startswith("https://")
        with httpx.Client(base_url=process.url, verify=trusting(pair), timeout=60) as client:
            assert client.get("/health").json() == {"status": "ok"}
            body = {"prompt": "a", "n_predict": 4, "ignore_eos": True, "stream": True}
            assert '"stop":true' in client.post("/completion", json=body).text
    finally:
        process.close()
    assert process.process.returncode == 0


def refusal(*arguments: str) -> str:
    options = parse_options("llama-server", list(arguments), {}, config_files=())
    with pytest.raises(SettingsError) as caught:
        settings_from_options(options, "m.gguf")
    return str(caught.value)


def test_one_file_without_the_other_is_refused(pair: TlsFiles) -> None:
    assert refusal("--ssl-key-file", pair.key) == "--ssl-key-file needs --ssl-cert-file too"
    assert refusal("--ssl-cert-file", pair.certificate) == "--ssl-cert-file needs --ssl-key-file too"


def test_files_that_cannot_serve_are_refused_with_their_names(pair: TlsFiles, tmp_path: Path) -> None:
    other = make_pair(tmp_path, "other")
    locked = make_pair(tmp_path, "locked", "-passout", "pass:secret")
    text = tmp_path / "text.pem"
    text.write_text("no PEM file\n")
    missing = str(tmp_path / "missing.pem")
    cases = [
        ((other.key, pair.certificate), f"{other.key} is not the key of the certificate {pair.certificate}"),
        ((locked.key, locked.certificate), "protected by a passphrase"),
        ((missing, pair.certificate), f"--ssl-key-file: {missing}: No such file or directory"),
        ((pair.key, missing), f"--ssl-cert-file: {missing}: No such file or directory"),
        ((pair.key, str(tmp_path)), f"--ssl-cert-file: {tmp_path}: Is a directory"),
        ((str(text), pair.certificate), f"{text} and {pair.certificate} are not a private key and its certificate"),
        ((pair.key, str(text)), f"{pair.key} and {text} are not a private key and its certificate"),
        ((pair.certificate, pair.key), "are not a private key and its certificate"),
    ]
    for (key, certificate), message in cases:
        assert message in refusal("--ssl-key-file", key, "--ssl-cert-file", certificate)
