"""HTTP as downloads need it: proxies from the environment, redirects that never carry a token to another host, and
retries with growing pauses.
"""

import email.utils
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from pyllama.errors import DownloadError

T = TypeVar("T")

MAX_REDIRECTS = 10
MAX_JSON_BYTES = 64 << 20
TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})

# Failures are counted from zero again after this many bytes: a cut per gigabyte must not end a long download.
PROGRESS_BYTES = 1 << 20


class Unreachable(DownloadError):
    """The other side cannot be reached, or fails again and again. What is in the cache may do instead."""


class Cancelled(DownloadError):
    """Another download of the same call failed, or the user interrupted."""


class Transient(Exception):
    """This attempt failed; another may not. `pause`: seconds that the server asked for."""

    def __init__(self, message: str, pause: float | None = None) -> None:
        super().__init__(message)
        self.pause = pause


@dataclass(frozen=True, slots=True)
class Access:
    """A token for one origin. `variable` is where users set it."""

    origin: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    variable: str = "HF_TOKEN"


NO_ACCESS = Access()


@dataclass(frozen=True, slots=True)
class Patience:
    """timeout: seconds without a byte. A pause doubles from `first_pause` on; a server may ask for `longest_pause`."""

    attempts: int = 6
    timeout: float = 30.0
    first_pause: float = 1.0
    longest_pause: float = 120.0


class Session:
    """Connections shared by several downloads. Thread-safe."""

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self._cancelled = threading.Event()
        try:
            self._client = httpx.Client(timeout=self.patience.timeout, headers={"User-Agent": "pyllama"})
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise DownloadError(f"the proxy settings in the environment cannot be used: {error}") from None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def cancel(self) -> None:
        """Every download of this session ends soon, with `Cancelled`; what it has stays on disk."""
        self._cancelled.set()

    def check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled("cancelled")

    @contextmanager
    def open(self, url: str, headers: Mapping[str, str], access: Access) -> Iterator[httpx.Response]:
        """The response to GET, body unread, after redirects (`history`). Status 200, 206, 304 or 416.

        Raises DownloadError; Transient or `httpx.RequestError` where another attempt may do better.
        """
        history: list[httpx.Response] = []
        target = parsed_url(url)
        while True:
            secret = access.headers if origin(target) == access.origin else {}
            request = self._client.build_request("GET", target, headers={**headers, **secret})
            response = self._client.send(request, stream=True)
            try:
                if "location" not in response.headers or response.status_code not in (301, 302, 303, 307, 308):
                    _check_status(response, access)
                    response.history = history
                    yield response
                    return
                history.append(response)
                target = _redirected(response)
            finally:
                response.close()
            if len(history) > MAX_REDIRECTS:
                raise DownloadError(f"{shown(url)}: more than {MAX_REDIRECTS} redirects")

    def get_bytes(self, url: str, access: Access, max_bytes: int) -> bytes:
        """A small file. Raises DownloadError, also for one that is longer than `max_bytes`."""

        def get() -> bytes:
            with self.open(url, {}, access) as response:
                return _whole_body(response, url, max_bytes)

        return self.retry(url, get, attempts=min(3, self.patience.attempts))

    def get_json(self, url: str, access: Access) -> tuple[Any, httpx.Headers]:
        """A JSON document and its response's headers. Raises DownloadError."""

        def get() -> tuple[Any, httpx.Headers]:
            with self.open(url, {"Accept": "application/json"}, access) as response:
                body = _whole_body(response, url, MAX_JSON_BYTES)
                try:
                    return json.loads(body), response.headers
                except (ValueError, RecursionError):
                    kind = response.headers.get("content-type", "something else")
                    raise DownloadError(
                        f"{shown(url)}: the answer is {kind}, not JSON; is a login page or a proxy in between?"
                    ) from None

        return self.retry(url, get, attempts=min(3, self.patience.attempts))

    def retry(
        self, url: str, action: Callable[[], T], *, progress: Callable[[], int] = lambda: 0, attempts: int | None = None
    ) -> T:
        """What `action` returns, tried again while it fails for reasons that may pass. Raises DownloadError.

        progress: bytes so far; it never goes down.
        """
        attempts = attempts or self.patience.attempts
        failures, mark = 0, progress()
        while True:
            self.check_cancelled()
            try:
                return action()
            except (Transient, httpx.RequestError) as error:
                if progress() - mark >= PROGRESS_BYTES:
                    failures, mark = 0, progress()
                failures += 1
                reason = str(error) or type(error).__name__
                if failures >= attempts:
                    raise Unreachable(f"{shown(url)}: {reason} (after {failures} attempts)") from None
                pause = getattr(error, "pause", None)
            if pause is None:
                pause = self.patience.first_pause * 2 ** (failures - 1) * random.uniform(1, 1.25)
            elif pause > self.patience.longest_pause:
                raise Unreachable(f"{shown(url)}: {reason}; the server asks to come back in {pause:.0f} s")
            self._cancelled.wait(min(pause, self.patience.longest_pause))


def _whole_body(response: httpx.Response, url: str, max_bytes: int) -> bytes:
    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > max_bytes:
            raise DownloadError(f"{shown(url)}: the answer is longer than {max_bytes} bytes")
    return bytes(body)


def parsed_url(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise DownloadError(f"{url!r} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise DownloadError(f"{shown(url)} is not an http or https URL")
    return parsed


def origin(url: httpx.URL | str) -> str:
    """Scheme, host and port: what a token belongs to."""
    url = parsed_url(url) if isinstance(url, str) else url
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    return f"{url.scheme}://{url.host.lower()}:{port}"


def shown(url: str | httpx.URL) -> str:
    """A URL for messages: without passwords and without the query, which may hold a signature."""
    url = str(url).partition("?")[0].partition("#")[0]
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return scheme + separator + host.rpartition("@")[2] + slash + path


def _redirected(response: httpx.Response) -> httpx.URL:
    try:
        target = response.url.join(response.headers["location"])
    except httpx.InvalidURL as error:
        raise DownloadError(f"{shown(response.url)}: redirected to what is not a URL: {error}") from None
    if target.scheme != "https" and not (target.scheme == response.url.scheme == "http"):
        raise DownloadError(f"{shown(response.url)}: redirected from https to {target.scheme}, which is not safe")
    return parsed_url(str(target))


def _check_status(response: httpx.Response, access: Access) -> None:
    status, where = response.status_code, shown(response.url)
    if status in (200, 206, 304, 416):
        return
    if status in TRANSIENT_STATUSES:
        raise Transient(f"the server answered {status} {response.reason_phrase}", _retry_after(response))
    if status in (401, 403):
        raise DownloadError(
            f"{where}: access denied ({status}); if the repository exists, accept its terms on its page "
            f"and set {access.variable} to a token that may read it"
        )
    if status in (404, 410):
        raise DownloadError(f"{where}: not found ({status})")
    raise DownloadError(f"{where}: the server answered {status} {response.reason_phrase}")


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds to wait, from a number or a date."""
    text = response.headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
