"""`/cors-proxy`: off by default; on, it passes on what it was told to and nothing that proves who somebody is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_process import ServerProcess

from pyllama.options import parse
from pyllama.server.api import cors_proxy
from pyllama.server.settings import settings_from_options

DISABLED = '{"error":{"message":"this feature is disabled","type":"feature_disabled"}}'


class Target(BaseHTTPRequestHandler):
    """`seen`: the requests, with their bodies."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str, dict[str, str], bytes]]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.command, self.path, {key.lower(): value for key, value in self.headers.items()}, body))
        status = int(self.path.rpartition("=")[2]) if "status=" in self.path else 200
        content = b"" if status in (204, 302) else b"x" * 5000 if "large" in self.path else b'{"a": 1}'
        self.send_response(status)
        for name, value in (
            ("Content-Type", "application/json"),
            ("Set-Cookie", "session=1"),
            ("Access-Control-Allow-Origin", "https://elsewhere"),
            ("X-Of-Target", "yes"),
            ("Location", "/elsewhere"),
        ):
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content) + (100 if "short" in self.path else 0)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the proxy has gone
            for byte in content if "slow" in self.path else b"":
                self.wfile.write(bytes([byte]))
                time.sleep(0.02)
            if "slow" not in self.path:
                self.wfile.write(content)
        self.close_connection = True

    do_POST = do_GET  # noqa: N815


@pytest.fixture
def target() -> Iterator[Any]:
    handler = type("Handler", (Target,), {"seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        server.url, server.seen = f"http://127.0.0.1:{server.server_address[1]}", handler.seen  # type: ignore[attr-defined]
        yield server
        server.shutdown()


def test_it_is_off_unless_asked_for_and_so_are_server_tools(serve: Any) -> None:
    server = serve()
    for path in ("/cors-proxy", "/tools"):
        for method in ("GET", "POST"):
            response = server.client.request(method, path, params={"url": "http://127.0.0.1:1/"})
            assert (response.status_code, response.text) == (403, DISABLED)
    assert server.get("/props").json()["cors_proxy_enabled"] is False
    assert serve(has_cors_proxy=True).get("/props").json()["cors_proxy_enabled"] is True
    assert serve(has_cors_proxy=True, api_keys=("secret",)).get("/cors-proxy?url=http://127.0.0.1/").status_code == 401


@pytest.mark.contract("security 7")
def test_only_headers_with_the_prefix_go_on(serve: Any, target: Any) -> None:
    server = serve(has_cors_proxy=True, api_keys=("secret",), cors_origins="localhost")
    headers = {
        "Authorization": "Bearer secret", "X-Api-Key": "secret", "Proxy-Authorization": "Basic x", "Cookie": "a=b",
        "X-Secret": "mine", "Origin": "http://localhost:3000",
        "X-Llama-Server-Proxy-Header-Accept": "text/event-stream",
        "X-Llama-Server-Proxy-Header-Authorization": "Bearer theirs",
        "X-Llama-Server-Proxy-Header-Cookie": "c=d",
        "X-Llama-Server-Proxy-Header-Host": "elsewhere",
        "X-Llama-Server-Proxy-Header-Proxy-Authorization": "Basic y",
    }  # fmt: skip
    url = f"{target.url}/mcp?x=1&y=%20#part"
    response = server.post("/cors-proxy", {"b": 2}, params={"url": url}, headers=headers)
    assert (response.status_code, response.json()) == (200, {"a": 1})
    ((method, path, seen, body),) = target.seen
    assert (method, path, body) == ("POST", "/mcp?x=1&y=%20", b'{"b":2}')
    host = target.url.removeprefix("http://")
    sent = {"host": host, "content-length": "7", "accept": "text/event-stream", "authorization": "Bearer theirs"}
    assert seen == sent


@pytest.mark.contract("proxy 1", "proxy 3")
@pytest.mark.parametrize("status", [200, 204, 302, 404, 500])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_answer_is_passed_on_as_it_is(serve: Any, target: Any, method: str, status: int) -> None:
    server = serve(has_cors_proxy=True)
    response = server.client.request(
        method, "/cors-proxy", params={"url": f"{target.url}/?status={status}"}, follow_redirects=False
    )
    assert response.status_code == status
    assert response.content == (b"" if status in (204, 302) else b'{"a": 1}')
    assert len(target.seen) == 1  # redirects are the page's to follow
    assert response.headers["x-of-target"] == "yes"
    assert response.headers["content-type"] == "application/json"
    assert response.headers["access-control-allow-origin"] == "*"
    assert response.headers["content-security-policy"] == "sandbox"
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize(
    "url",
    [
        "", "example.com", "file:///etc/passwd", "ftp://example.com/", "gopher://x/", "http://", "http:///path",
        "http://user@127.0.0.1/", "http://user:secret@127.0.0.1/", "http://[::1", "http://x:99999999/", "//x/",
        "javascript:alert(1)", "http://x/" + "a" * 9000,
    ],
)  # fmt: skip
def test_other_urls_are_refused(serve: Any, url: str) -> None:
    response = serve(has_cors_proxy=True).get("/cors-proxy", params={"url": url})
    assert response.status_code == 400
    assert "URL" in response.json()["error"]["message"]


def test_a_target_that_does_not_answer_is_an_error(serve: Any, target: Any) -> None:
    server = serve(has_cors_proxy=True)
    target.shutdown()
    target.server_close()
    response = server.get("/cors-proxy", params={"url": target.url})
    assert response.status_code == 500
    assert "did not answer" in response.json()["error"]["message"]


def test_an_answer_beyond_the_limit_or_cut_short_breaks_off(
    serve: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(has_cors_proxy=True)
    monkeypatch.setattr(cors_proxy, "MAX_ANSWER_BYTES", 1000)
    for path, words in (("large", "is larger than 1000 bytes"), ("short", "broke off")):
        with pytest.raises(Exception, match=words):
            server.get("/cors-proxy", params={"url": f"{target.url}/{path}"})


def test_an_answer_that_never_stands_still_ends_in_time_too(
    serve: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(has_cors_proxy=True)
    monkeypatch.setattr(cors_proxy, "SECONDS", 0.3)
    with pytest.raises(Exception, match=r"took longer than 0\.3 seconds|broke off"):  # 5000 bytes, 50 a second
        server.get("/cors-proxy", params={"url": f"{target.url}/large-slow"})


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"Origin": "http://localhost:3000"}, True),
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-origin"}, True),
    ],
)
def test_strangers_pages_are_kept_out(serve: Any, target: Any, headers: dict[str, str], allowed: bool) -> None:
    server = serve(has_cors_proxy=True, cors_origins="localhost")
    response = server.get("/cors-proxy", params={"url": target.url}, headers=headers)
    assert response.status_code == (200 if allowed else 403)
    assert len(target.seen) == allowed


def test_the_option_alone_lets_only_local_pages_in() -> None:
    def policy(*arguments: str) -> tuple[bool, str]:
        settings = settings_from_options(parse("llama-server", list(arguments), {}, config_files=()), "m")
        return settings.has_cors_proxy, settings.cors_origins

    assert policy() == (False, "*")
    assert policy("--ui-mcp-proxy") == (True, "localhost")
    assert policy("--ui-mcp-proxy", "--cors-origins", "*") == (True, "*")


@pytest.mark.contract("proxy 2")
@pytest.mark.parametrize("is_router", [False, True])
def test_the_server_fetches_its_own_list_of_models(tiny_llama_path: Path, tmp_path: Path, is_router: bool) -> None:
    pytest.importorskip("pyllama._engine", reason="needs the native module")
    model = () if is_router else ("-m", str(tiny_llama_path), "-c", "512")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = ServerProcess(tmp_path, *model, "-t", "1", "--ui-mcp-proxy", environment=environ)
    try:
        process.wait_ready()
        assert "experimental: /cors-proxy" in process.log
        fetched = httpx.get(process.url + "/cors-proxy", params={"url": process.url + "/models"}, timeout=20)
        own = httpx.get(process.url + "/models", timeout=20)
        assert set(fetched.json()) == set(own.json())
        assert httpx.get(process.url + "/tools", timeout=20).status_code == 403
        started = time.monotonic()
    finally:
        process.close()
    assert process.process.returncode == 0
    assert time.monotonic() - started < 5
