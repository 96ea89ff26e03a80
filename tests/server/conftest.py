"""Helpers of the server tests: an application around the fake engine, and a client for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session")
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("authorities")


@pytest.fixture(autouse=True)
def cheap_http_clients(monkeypatch: pytest.MonkeyPatch, no_authorities: Path) -> None:
    """httpx reads the list of authorities for every client that it makes, for plain HTTP too: 30 ms of CPU a call. No
    test reaches a server that they vouch for.
    """
    monkeypatch.setenv("SSL_CERT_DIR", str(no_authorities))


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """`serve(**options)` -> a `support_app.FakeServer`; all of them are closed at the end of the test."""
    from support_app import FakeServer

    servers: list[FakeServer] = []

    def start(**options: Any) -> FakeServer:
        server = FakeServer(**options)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def listen() -> Iterator[Callable[..., Any]]:
    """As `serve`, with a `socket_server.SocketServer`: clients connect to its `url`."""
    from socket_server import SocketServer

    servers: list[SocketServer] = []

    def start(**options: Any) -> SocketServer:
        servers.append(SocketServer(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
