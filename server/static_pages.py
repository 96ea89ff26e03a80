"""The folder of `--path`: its files at the root of the server, for GET and HEAD.

A browser that knew another web interface at this address may still run its service worker, which would go on to show
that interface; `/sw.js` is where it looks for a newer one, and gets one that takes its leave.
"""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from pyllama.server.settings import ServerSettings

LEAVING_WORKER = b"""\
self.addEventListener('install', () => self.skipWaiting());
self.addEventListener('activate', (event) => {
  event.waitUntil(
    (async () => {
      for (const name of await caches.keys()) await caches.delete(name);
      await self.registration.unregister();
      for (const page of await self.clients.matchAll({ type: 'window' })) page.navigate(page.url);
    })(),
  );
});
"""


async def service_worker(http: Request) -> Response:
    """The folder's own, where it has one."""
    settings: ServerSettings = http.app.state.server.settings
    own = Path(settings.static_path, WORKER_NAME) if settings.static_path else None
    if own is not None and own.is_file():
        return await StaticPages(settings.static_path).get_response(WORKER_NAME, http.scope)
    return Response(LEAVING_WORKER, media_type="text/javascript", headers={"Cache-Control": "no-cache"})


WORKER_NAME = "sw.js"


class StaticPages(StaticFiles):
    """A folder, and `index.html` for each folder in it. Nothing outside of it is served, also not through links."""

    def __init__(self, folder: str) -> None:
        super().__init__(directory=folder, html=True)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Raises `HTTPException`; what is not there has the body of every 404, whatever the folder holds."""
        response = await super().get_response(path, scope)
        if response.status_code == 404:
            raise HTTPException(404)
        return response


class PagesFirst:
    """What the folder has is served from it; every other request goes on to `app`, and so do those for a model."""

    def __init__(self, pages: StaticPages, app: ASGIApp) -> None:
        self._pages = pages
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in ("GET", "HEAD"):
            try:
                response = await self._pages.get_response(self._pages.get_path(scope), scope)
            except HTTPException:
                pass
            else:
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
