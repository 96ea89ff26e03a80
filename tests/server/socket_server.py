"""The application with the fake engine behind a real listening socket, for clients that make connections."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import uvicorn
from support_app import FakeServer


class SocketServer(FakeServer):
    """The application behind uvicorn on a free port."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        config = uvicorn.Config(self.app, log_config=None, access_log=False, lifespan="off")
        self.uvicorn = uvicorn.Server(config)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        while not self.uvicorn.started:
            time.sleep(0.01)

    def _run(self) -> None:
        async def serve() -> None:
            self.state.event_loop = asyncio.get_running_loop()
            await self.uvicorn.serve(sockets=[self.socket])

        asyncio.run(serve())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(10)
        super().close()
