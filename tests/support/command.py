"""Calls a command-line program in this process, without what the machine's environment would tell it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from pyllama.tools.command_line import run_command


class Answer(NamedTuple):
    code: int
    out: str
    err: str


class Caller:
    def __init__(self, capture: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: str) -> None:
        self._capture = capture
        for name in [name for name in os.environ if name.startswith("LLAMA_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("XDG_CONFIG_HOME", home)

    def __call__(self, main: Callable[[Sequence[str]], int], *argv: object) -> Answer:
        self._capture.readouterr()
        with pytest.raises(SystemExit) as end:
            run_command(main, [str(argument) for argument in argv])
        return Answer(int(end.value.code or 0), *self._capture.readouterr())

    def succeed(self, main: Callable[[Sequence[str]], int], *argv: object) -> str:
        answer = self(main, *argv)
        assert answer.code == 0, answer.err
        return answer.out

    def fail(self, main: Callable[[Sequence[str]], int], *argv: object) -> str:
        """The message of a call that must end with one error line and code 1."""
        answer = self(main, *argv)
        assert answer.code == 1, answer
        messages = [line for line in answer.err.splitlines() if line.startswith("error")]
        assert len(messages) == 1, answer.err
        return messages[0]
