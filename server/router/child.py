"""What a server does as the child of a router: it tells its state, and ends when the router says so or is gone.

child to router     cmd_child_to_router:state:{"state": "loading", "port": 41231}
                    ... "downloading"; "loaded" with "model", the entry of /models; "sleeping", and "loaded" again
router to child     cmd_router_to_child:exit
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

PARENT_PORT = "LLAMA_SERVER_ROUTER_PORT"
STATE = b"cmd_child_to_router:state:"
EXIT = b"cmd_router_to_child:exit"


class Parent:
    """The router that started this process, if one did."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._exists = PARENT_PORT in environ

    def obey(self) -> None:
        """From now on the router's word ends this process gracefully, and the router's end ends it at once."""
        if self._exists:
            threading.Thread(target=_listen, name="router", daemon=True).start()

    def tell(self, state: str, **facts: Any) -> None:
        if self._exists:
            # Not through sys.stdout, whose lock a thread may hold when the process ends.
            os.write(1, STATE + json.dumps({"state": state, **facts}).encode() + b"\n")


def _listen() -> None:
    received = b""
    while data := os.read(0, 4096):
        *lines, received = (received + data).split(b"\n")
        if EXIT in (line.strip() for line in lines):
            os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)
