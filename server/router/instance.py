"""One `llama-server` process that serves one model on a port of its own, as the router sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from pyllama.options import options_of
from pyllama.server.router.child import EXIT, PARENT_PORT, STATE
from pyllama.server.router.presets import OWN_OPTIONS, TOOL

log = logging.getLogger("pyllama.server.child")
log.setLevel(logging.DEBUG)  # what a child says was filtered by its own verbosity

LONGEST_LINE = 1 << 20
SERVING = ("loaded", "sleeping")  # a sleeping child wakes by itself when it is asked


class Instance:
    """`state`: what the child said last, "starting" until then; it has ended when `run` returns.

    api_key: the child's only one, so that nobody but the router talks to it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        router_port: int,
        on_state: Callable[[Instance], None],
    ) -> None:
        self.arguments = [*arguments, "--host", "127.0.0.1", "--port", "0"]
        self.api_key = secrets.token_urlsafe(24)
        self.state = "starting"
        self.port = 0
        self.model: dict[str, Any] = {}
        self.is_stopping = False
        self._environment = child_environment(environ, self.api_key, router_port)
        self._on_state = on_state
        self._process: asyncio.subprocess.Process | None = None
        self._stopper: asyncio.Task[None] | None = None

    @property
    def is_loaded(self) -> bool:
        return self.state in SERVING and not self.is_stopping

    async def run(self) -> int:
        """Start the process and see it through to its end: the exit code. Raises `OSError` when it cannot start."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "pyllama.server", *self.arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # a Ctrl-C is for the router, which tells its children
        )
        try:
            if self.is_stopping:
                self._kill()
            assert process.stdout is not None
            assert process.stderr is not None
            await asyncio.gather(self._follow(process.stdout), self._repeat(process.stderr))
            return await process.wait()
        finally:
            self._kill()
            if self._stopper is not None:
                self._stopper.cancel()

    def stop(self, timeout: float) -> None:
        """Ask for the end, and insist after `timeout` seconds. A child that is still loading is killed."""
        if self.is_stopping:
            return
        self.is_stopping = True
        if self._process is None:
            return
        if self.state not in SERVING:
            self._kill()
            return
        assert self._process.stdin is not None
        self._process.stdin.write(EXIT + b"\n")
        self._stopper = asyncio.create_task(self._kill_after(timeout))

    async def _kill_after(self, timeout: float) -> None:
        await asyncio.sleep(timeout)
        log.warning("[%d] did not end within %g seconds and is killed", self.port, timeout)
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _follow(self, stdout: asyncio.StreamReader) -> None:
        async for line in _lines(stdout):
            if not line.startswith(STATE):
                log.info("[%d] %s", self.port, line.decode("utf-8", "replace"))
                continue
            message = json.loads(line[len(STATE) :])
            self.state = message["state"]
            self.port = message.get("port", self.port)
            self.model = message.get("model", self.model)
            self._on_state(self)

    async def _repeat(self, stderr: asyncio.StreamReader) -> None:
        async for line in _lines(stderr):
            log.info("[%d] %s", self.port, line.decode("utf-8", "replace"))


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; an endless one comes in pieces."""
    rest = b""
    while data := await reader.read(65536):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > LONGEST_LINE:
            yield rest
            rest = b""
    if rest:
        yield rest


def child_environment(environ: Mapping[str, str], api_key: str, router_port: int) -> dict[str, str]:
    """The router's, without what is the router's own; values that a configuration file may hold are overruled."""
    own = {
        name
        for option in options_of(TOOL)
        if option.dest in OWN_OPTIONS
        for name in (option.env, option.negated_env)
        if name is not None
    }
    own |= {name for name in environ if name.startswith("AIP_")}  # the platform asks the router, not its children
    environment = {name: value for name, value in environ.items() if name not in own}
    environment |= {"LLAMA_API_KEY": api_key, "LLAMA_ARG_API_PREFIX": "", "LLAMA_ARG_LOG_FILE": ""}
    environment[PARENT_PORT] = str(router_port)
    # `-m` would look for the package in the working directory first.
    environment.setdefault("PYTHONSAFEPATH", "1")
    return environment
