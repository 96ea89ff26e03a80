"""The terminal side of llama-cli: colours, input lines, and Ctrl-C while an answer is written."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

GREEN_BOLD = "\x1b[1;32m"
DIM = "\x1b[2m"
RESET = "\x1b[0m"

PROMPT = "> "


class Console:
    """Standard input and output of a chat.

    color: `on`, `off` or `auto` (a terminal, without the variable NO_COLOR). simple: neither colours nor line editing.
    multiline: a line continues the message unless it ends in a backslash; otherwise a backslash continues it.
    """

    def __init__(
        self,
        *,
        color: str = "auto",
        simple: bool = False,
        multiline: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.interactive = sys.stdin.isatty()
        self._multiline = multiline
        self._is_thinking = False
        environ = os.environ if environ is None else environ
        wanted = color == "on" or (color == "auto" and sys.stdout.isatty() and not environ.get("NO_COLOR"))
        self._colored = wanted and not simple
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding lacks
        if self.interactive and not simple:
            _enable_line_editing()

    def read_message(self) -> str | None:
        """The next message, its lines joined; None at the end of input. KeyboardInterrupt passes through."""
        lines: list[str] = []
        while True:
            line = self._read_line(PROMPT if not lines else "")
            if line is None:
                return "\n".join(lines) if lines else None
            continues = line.endswith("\\") is not self._multiline
            lines.append(line.removesuffix("\\"))
            if not continues:
                return "\n".join(lines)

    def _read_line(self, prompt: str) -> str | None:
        if self.interactive:
            # The colour codes are printed apart: line editing would count them as columns of the prompt.
            if self._colored:
                sys.stdout.write(GREEN_BOLD)
            try:
                return input(prompt)
            except EOFError:
                return None
            finally:
                if self._colored:
                    sys.stdout.write(RESET)
                sys.stdout.flush()
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None

    def show_message(self, text: str) -> None:
        """Echo a message that was not typed, as if it had been."""
        self._write(sys.stdout, f"{PROMPT}{text}\n", GREEN_BOLD)

    def write(self, text: str) -> None:
        """Part of an answer, shown at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def write_thoughts(self, text: str) -> None:
        """Part of the thoughts before an answer, between two lines that say so; an empty text ends them."""
        if text and not self._is_thinking:
            self._write(sys.stdout, "[Start thinking]\n", DIM)
        self._is_thinking = bool(text)
        self._write(sys.stdout, text or "\n[End thinking]\n\n", DIM)

    def note(self, text: str) -> None:
        """A line beside the conversation, on stderr so that a pipe carries answers only."""
        self._write(sys.stderr, f"{text}\n", DIM)

    def error(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr, flush=True)

    def _write(self, out: TextIO, text: str, code: str) -> None:
        out.write(f"{code}{text}{RESET}" if self._colored and out.isatty() else text)
        out.flush()


def _enable_line_editing() -> None:
    # Importing it is what gives input() editing and history; a Python built without it reads plain lines.
    with suppress(ImportError):
        import readline  # noqa: F401


class Interrupter:
    """Ctrl-C while an answer is made: before its first text it interrupts at once, after that it asks to stop.

    Stopping between two pieces of text, where possible, leaves no call half done. A second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self.answering = False

    @contextmanager
    def installed(self) -> Iterator["Interrupter"]:
        previous = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.answering:
            raise KeyboardInterrupt
        self.requested = True
