"""Which web pages may read this server's answers: the value of `--cors-origins`."""

from __future__ import annotations

import csv
from urllib.parse import urlsplit

from pyllama.server.settings import ServerSettings

LOCAL = "localhost"
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


class OriginPolicy:
    """`*`, `localhost` (every origin on this host), one origin, or a comma list of origins and `localhost`.

    Without an API key any web page could use a local server, so `*` is then answered literally and without credentials.
    """

    def __init__(self, settings: ServerSettings) -> None:
        text = settings.cors_origins
        self._is_any = text == "*"
        entries = [entry.strip() for entry in next(csv.reader([text]), [])]
        # One origin is a constant, as llama-server has it; of several a browser takes only its own.
        self._constant = text.encode("latin-1", "replace") if len(entries) < 2 and text != LOCAL else None
        self._entries = frozenset(entry.rstrip("/") for entry in entries)
        self.allows_credentials = settings.cors_credentials and (not self._is_any or bool(settings.api_keys))

    @property
    def depends_on_origin(self) -> bool:
        """Whether caches must keep answers apart by the origin that asked."""
        return self._constant is None or (self._is_any and self.allows_credentials)

    def allowed(self, origin: bytes) -> bytes | None:
        """The value of `Access-Control-Allow-Origin`, or None for none. origin: of the request, empty without one."""
        if self._is_any:
            return origin if self.allows_credentials else b"*"
        if self._constant is not None:
            return self._constant
        return origin if self._is_listed(origin.decode("latin-1")) else None

    def admits(self, origin: bytes) -> bool:
        """Whether a page of this origin may read answers."""
        return self._is_any or self.allowed(origin) == origin

    def _is_listed(self, origin: str) -> bool:
        if origin in self._entries:
            return "*" not in origin
        if LOCAL not in self._entries:
            return False
        try:
            return urlsplit(origin).hostname in LOCAL_HOSTS
        except ValueError:
            return False
