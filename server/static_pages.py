"""The folder of `--path`: its files at the root of the server, for GET and HEAD."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send


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
