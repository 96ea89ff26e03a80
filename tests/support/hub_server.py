"""A web server that imitates the APIs of Hugging Face and ModelScope on a free port, and fails on demand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request for a file is answered. The defaults: as a good server does."""

    status: int = 0  # 0: 200 or 206
    headers: dict[str, str | None] = field(default_factory=dict)  # replace what would be sent; None leaves it out
    body: bytes | None = None  # in place of the file
    cut_after: int | None = None  # bytes of the body, then the connection ends
    ignores_ranges: bool = False
    shift: int = 0  # a range starts that many bytes too late
    redirect: str = ""  # the host, or the URL, that has the file
    seconds_per_block: float = 0.0
    etag: bool = True


BLOCK = 16 << 10


class HubServer:
    """`repos[repo][path]` and `urls[path]` are bytes. `answers` are used up one by one by requests for files, then
    `answer` holds; `api_answers` likewise by requests of the APIs. `requests` collects (path, headers)."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.urls: dict[str, bytes] = {}
        self.answers: list[Answer] = []
        self.answer = Answer()
        self.api_answers: list[Answer] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.page_size = 1000
        self.link_host = ""
        self.tells_checksums = True
        self.wrong_sizes: dict[str, int] = {}
        self.wrong_checksums: dict[str, str] = {}
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._http = _Server(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def start(self) -> HubServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def file_requests(self) -> list[dict[str, str]]:
        """The headers of the requests for files, lower-case names."""
        with self.lock:
            return [headers for path, headers in self.requests if not re.search(r"/(revision|tree)/|/repo/files", path)]

    def commit(self, repo: str) -> str:
        digest = hashlib.sha1()
        for path, data in sorted(self.repos[repo].items()):
            digest.update(path.encode() + hashlib.sha256(data).digest())
        return digest.hexdigest()


@contextlib.contextmanager
def running_hub() -> Iterator[HubServer]:
    hub = HubServer().start()
    try:
        yield hub
    finally:
        hub.close()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        path, query = unquote(parts.path), {key: value[0] for key, value in parse_qs(parts.query).items()}
        with hub.lock:
            hub.requests.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/main", path):
            self._api(found[1], lambda repo: {"id": repo, "sha": hub.commit(repo)})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(\w+)", path):
            self._api(found[1], lambda repo: self._tree(repo, int(query.get("cursor", 0))))
        elif found := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo/files", path):
            self._api(found[1], self._modelscope_files)
        elif found := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo", path):
            self._file(hub.repos.get(found[1], {}).get(query["FilePath"]))
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", path):
            self._file(hub.repos.get(found[1], {}).get(found[3]), linked=True)
        else:
            self._file(hub.urls.get(path))

    # ---- APIs

    def _api(self, repo: str, document: Any) -> None:
        with self.hub.lock:
            answer = self.hub.api_answers.pop(0) if self.hub.api_answers else Answer()
        self.link = ""
        if answer.body is not None or answer.status:
            body, status = answer.body or b"", answer.status or 200
        elif repo not in self.hub.repos:
            body, status = b'{"error":"Repository not found"}', 404
        else:
            body, status = json.dumps(document(repo)).encode(), 200
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **answer.headers}
        if self.link:
            headers["Link"] = self.link
        self._send(status, headers, body)

    def _size(self, path: str, data: bytes) -> int:
        return self.hub.wrong_sizes.get(path, len(data))

    def _checksum(self, path: str, data: bytes) -> str:
        return self.hub.wrong_checksums.get(path) or sha256(data)

    def _tree(self, repo: str, start: int) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = [{"type": "directory", "path": "folder.gguf", "oid": "0" * 40, "size": 0}]
        for path, data in self.hub.repos[repo].items():
            entry = {"type": "file", "path": path, "oid": "1" * 40, "size": self._size(path, data)}
            if self.hub.tells_checksums:
                entry["lfs"] = {"oid": self._checksum(path, data), "size": entry["size"], "pointerSize": 134}
            entries.append(entry)
        end = start + self.hub.page_size
        if end < len(entries):
            self.link = f'<{self.hub.link_host}{self.path.partition("?")[0]}?recursive=true&cursor={end}>; rel="next"'
        return entries[start:end]

    def _modelscope_files(self, repo: str) -> dict[str, Any]:
        files: list[dict[str, Any]] = [{"Type": "tree", "Path": "folder.gguf", "Name": "folder.gguf", "Size": 0}]
        for path, data in self.hub.repos[repo].items():
            entry = {"Type": "blob", "Path": path, "Name": path.rpartition("/")[2], "Size": self._size(path, data)}
            files.append(entry | {"Sha256": self._checksum(path, data) if self.hub.tells_checksums else ""})
        return {"Code": 200, "Data": {"Files": files}, "Message": "success", "Success": True}

    # ---- files

    def _file(self, data: bytes | None, *, linked: bool = False) -> None:
        hub = self.hub
        with hub.lock:
            answer = hub.answers.pop(0) if hub.answers else hub.answer
        if data is None:
            self._send(404, {"Content-Length": "0"}, b"")
            return
        etag = f'"{sha256(data)[:16]}"'
        headers: dict[str, str | None] = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if answer.etag:
            headers["ETag"] = etag
        if answer.redirect:
            target = answer.redirect if "//" in answer.redirect else f"http://{answer.redirect}:{hub.port}{self.path}"
            headers |= {"Location": target, "Content-Length": "0"}
            if linked:
                headers |= {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
            self._send(answer.status or 302, headers | answer.headers, b"")
            return
        if answer.etag and self.headers.get("If-None-Match") == etag and not answer.status:
            self._send(304, headers, b"")
            return
        status, body = 200, data
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        unchanged = self.headers.get("If-Range") in (None, etag, answer.headers.get("Last-Modified"))
        if found and not answer.ignores_ranges and unchanged:
            start = int(found[1])
            if start >= len(data):
                self._send(416, {"Content-Range": f"bytes */{len(data)}", "Content-Length": "0"}, b"")
                return
            status, body = 206, data[start + answer.shift :]
            headers["Content-Range"] = f"bytes {start + answer.shift}-{len(data) - 1}/{len(data)}"
        body = body if answer.body is None else answer.body
        headers["Content-Length"] = str(len(body))
        self._send(answer.status or status, headers | answer.headers, body, answer)

    def _send(self, status: int, headers: dict[str, str | None], body: bytes, answer: Answer | None = None) -> None:
        answer = answer or Answer()
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        is_chunked = headers.get("Transfer-Encoding") == "chunked"
        sent = body if answer.cut_after is None else body[: answer.cut_after]
        for start in range(0, len(sent), BLOCK):
            block = sent[start : start + BLOCK]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block) if is_chunked else block)
            if answer.seconds_per_block:
                time.sleep(answer.seconds_per_block)
        if is_chunked and answer.cut_after is None:
            self.wfile.write(b"0\r\n\r\n")
        if answer.cut_after is not None or "Content-Length" in answer.headers:
            self.close_connection = True


GOOD = Answer()


def cut(n_bytes: int, **changes: Any) -> Answer:
    return replace(GOOD, cut_after=n_bytes, **changes)
