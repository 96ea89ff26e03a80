"""Listening sockets: one per address of `--host`, bound before the model is loaded."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path

BACKLOG = 512


class BindError(OSError):
    """An address cannot be listened on."""


@dataclass(frozen=True, slots=True)
class Listener:
    """`url`: as shown to the user. `port`: 0 for UNIX sockets."""

    socket: socket.socket
    url: str
    port: int = 0


def open_listeners(
    hosts: tuple[str, ...], port: int, *, reuse_port: bool = False, scheme: str = "http"
) -> list[Listener]:
    """Bind and listen on every address. Names that end in `.sock` are UNIX sockets; port 0 takes a free port.
    scheme: what the URLs of the others begin with.

    Raises `BindError`.
    """
    n_tcp = sum(not host.endswith(".sock") for host in hosts)
    if port == 0 and n_tcp > 1:
        raise BindError(f"--port 0 cannot be shared by several addresses: {', '.join(hosts)}")
    listeners: list[Listener] = []
    try:
        for host in hosts:
            if host.endswith(".sock"):
                listeners.append(_open_unix(host))
            else:
                listeners.append(_open_tcp(host, port, reuse_port=reuse_port, v6_only=n_tcp > 1, scheme=scheme))
    except OSError as error:
        for listener in listeners:
            listener.socket.close()
        raise BindError(f"couldn't bind HTTP server socket, hostname: {host}, port: {port}: {error}") from error
    return listeners


def _open_tcp(host: str, port: int, *, reuse_port: bool, v6_only: bool, scheme: str) -> Listener:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(v6_only))
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    shown = f"[{host}]" if ":" in host else host
    bound_port = sock.getsockname()[1]
    return Listener(sock, f"{scheme}://{shown}:{bound_port}", bound_port)


def _open_unix(path: str) -> Listener:
    # A socket file that an earlier process left behind is replaced; anything else at that path is not touched.
    with contextlib.suppress(FileNotFoundError):
        if Path(path).is_socket():
            Path(path).unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return Listener(sock, f"unix://{path}")
