"""One streamed answer of llama-cli: writes it as it comes, stops on Ctrl-C, and measures both phases."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .console import Interrupter


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens computed and seconds taken: of the prompt (without reused tokens), and of what follows the first text."""

    prompt_tokens: int
    prompt_seconds: float
    generated_tokens: int
    generated_seconds: float

    def __str__(self) -> str:
        prompt = _rate(self.prompt_tokens, self.prompt_seconds)
        generation = _rate(self.generated_tokens, self.generated_seconds)
        return f"[ Prompt: {prompt} t/s | Generation: {generation} t/s ]"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f}" if tokens > 0 and seconds > 0 else "-"


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    interrupted: bool
    speed: Speed
    thoughts: str = ""


def stream_answer(
    llama: Any,
    start: Callable[[], Iterable[Mapping[str, Any]]],
    write: Callable[[str], None],
    interrupter: Interrupter,
    write_thoughts: Callable[[str], None] | None = None,
) -> Answer:
    """Show the chunks of `start()` (chat or plain completion dictionaries). The library's errors pass through.

    write_thoughts: shows thoughts that are told apart from the answer; it gets an empty text when they end.

    llama: read for the lengths of its sequence (`n_tokens`, `input_ids`) before, at the first text and after, and for
    what context shifts dropped of it (`n_discarded`).
    """
    before = llama.input_ids
    n_discarded = llama.n_discarded
    pieces: list[str] = []
    thoughts: list[str] = []
    is_thinking = False
    n_first = None
    started = first = time.perf_counter()
    interrupter.requested = interrupter.answering = False
    interrupted = False
    with interrupter.installed():
        stream = start()
        try:
            for chunk in stream:
                thought, text = _texts(chunk)
                if (thought or text) and n_first is None:
                    first, n_first = time.perf_counter(), llama.n_tokens
                    interrupter.answering = True
                if thought and write_thoughts is not None:
                    is_thinking = True
                    thoughts.append(thought)
                    write_thoughts(thought)
                if text:
                    if is_thinking and write_thoughts is not None:
                        is_thinking = False
                        write_thoughts("")
                    pieces.append(text)
                    write(text)
                if interrupter.requested:
                    interrupted = True
                    break
        except KeyboardInterrupt:
            interrupted = True
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
    if is_thinking and write_thoughts is not None:
        write_thoughts("")
    ended = time.perf_counter()
    after = llama.input_ids
    n_after = len(after) + llama.n_discarded - n_discarded
    if n_first is None:  # no text at all: everything was prompt
        first, n_first = ended, n_after
    reused = next((i for i, (old, new) in enumerate(zip(before, after)) if old != new), min(len(before), len(after)))  # noqa: B905
    speed = Speed(n_first - min(reused, n_first), first - started, n_after - n_first, ended - first)
    return Answer("".join(pieces), interrupted, speed, "".join(thoughts))


def _texts(chunk: Mapping[str, Any]) -> tuple[str, str]:
    """Thoughts and answer in a chunk."""
    choice = chunk["choices"][0]
    if "delta" not in choice:
        return "", str(choice["text"])
    return choice["delta"].get("reasoning_content") or "", choice["delta"].get("content") or ""
