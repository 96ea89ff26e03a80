"""The server as a process of its own, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx


class ServerProcess:
    """`python -m pyllama.server` on a free port; its log is in `log_path`. `environment`: variables of it alone."""

    def __init__(
        self, directory: Path, *arguments: str, port: int = 0, environment: Mapping[str, str] | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log_path = directory / "log.txt"
        self._log = self.log_path.open("wb")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("LLAMA_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pyllama.server", "--port", str(port), *arguments],
            cwd=directory,
            env={**inherited, "XDG_CONFIG_HOME": str(directory), **(environment or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.url = f"http://127.0.0.1:{port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while (found := re.search(r"listening on (https?://\S+)", self.log)) is None:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.url = found[1]

    def wait_exit(self, seconds: float = 30) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **options)

    def wait_idle(self, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while any(slot["is_processing"] for slot in httpx.get(self.url + "/slots", timeout=10).json()):
            assert time.monotonic() < deadline, "a slot is still busy"
            time.sleep(0.02)
