"""The conversation of llama-cli: history, commands that begin with `/`, and turns."""

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyllama.errors import InvalidArgument, PyllamaError

from .answer import Answer, stream_answer
from .console import Console, Interrupter

HELP = """commands:
  /exit           leave (also /quit, Ctrl-D, and Ctrl-C at the prompt)
  /clear          forget the conversation, keep the system message
  /regen          answer the last message again
  /read FILE      put a text file before the next message
  /glob PATTERN   put all matching text files before the next message
  /help           this list"""


class ChatSession:
    """Turns over one `Llama`, which keeps what consecutive prompts share.

    arguments: keyword arguments of `create_chat_completion`. show_timings: a line with the speeds after every answer.
    """

    def __init__(
        self,
        llama: Any,
        console: Console,
        *,
        arguments: Mapping[str, Any],
        system_prompt: str = "",
        show_timings: bool = True,
    ) -> None:
        self._llama = llama
        self._console = console
        self._arguments = dict(arguments)
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._show_timings = show_timings
        self._interrupter = Interrupter()
        self._attachments: list[str] = []
        self.messages: list[dict[str, str]] = list(self._system)
        self.failed = False
        """Whether a turn or a command failed; without a terminal this becomes the exit code."""

    def handle(self, line: str) -> bool:
        """Take one input: a command or a message. False when the user wants to leave."""
        command, _, argument = line.strip().partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/clear":
            self.messages = list(self._system)
            self._attachments = []
            self._console.note("conversation cleared")
        elif command == "/regen":
            self._regenerate()
        elif command == "/read":
            self._attach([argument.strip()] if argument.strip() else [])
        elif command == "/glob":
            self._attach(sorted(glob.glob(argument.strip(), recursive=True)))  # noqa: PTH207 -- may be absolute
        elif command == "/help":
            self._console.note(HELP)
        elif line.strip():
            self.ask(line)
        return True

    def ask(self, text: str) -> Answer | None:
        """One turn. None when it failed or was interrupted before any text: the message is then not in the history."""
        content = "\n\n".join([*self._attachments, text])
        self.messages.append({"role": "user", "content": content})
        answer = self._answer()
        if answer is None:
            self.messages.pop()
        else:
            self._attachments = []
        return answer

    def _regenerate(self) -> None:
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            self._fail("there is no answer to make again")
            return
        last = self.messages.pop()
        if self._answer() is None:
            self.messages.append(last)

    def _answer(self) -> Answer | None:
        def start() -> Any:
            return self._llama.create_chat_completion(self.messages, stream=True, **self._arguments)

        try:
            answer = stream_answer(
                self._llama, start, self._console.write, self._interrupter, self._console.write_thoughts
            )
        except PyllamaError as error:
            hint = " (/clear starts anew)" if self._console.interactive and isinstance(error, InvalidArgument) else ""
            self._fail(f"{error}{hint}")
            return None
        self._console.write("\n")
        if answer.interrupted and not answer.text:
            return None
        message = {"role": "assistant", "content": answer.text}
        if answer.thoughts:
            message["reasoning_content"] = answer.thoughts
        self.messages.append(message)
        if self._show_timings:
            self._console.note(f"{answer.speed}\n")
        return answer

    def _attach(self, paths: list[str]) -> None:
        if not paths:
            self._fail("no such file")
        for path in paths:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
                self._fail(f"cannot read '{path}': {reason}")
                continue
            self._attachments.append(f"File {path}:\n{text}")
            self._console.note(f"read {path}")

    def _fail(self, text: str) -> None:
        self.failed = True
        self._console.error(text)
