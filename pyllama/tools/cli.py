"""`llama-cli`: chat with a model in the terminal, or continue a text with `-no-cnv`. Works in pipes as well."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from pyllama.errors import PyllamaError
from pyllama.options import Options, parse_options

from .answer import stream_answer
from .chat_session import ChatSession
from .console import Console, Interrupter
from .loading import chat_arguments, load_llama, sampling_arguments

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options("llama-cli", sys.argv[1:] if argv is None else argv, os.environ)
    console = Console(color=options.color, simple=options.simple_io, multiline=options.multiline_input)
    try:
        llama = load_llama(options)
    except (PyllamaError, OSError) as error:
        console.error(str(error))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        return chat(llama, console, options) if wants_chat(options, llama) else complete(llama, console, options)
    except KeyboardInterrupt:
        console.write("\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone. Python would complain once more while flushing at exit: give it a sink.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        llama.close()


def run() -> None:
    sys.exit(main())


def wants_chat(options: Options, llama: Any) -> bool:
    """-cnv and -no-cnv decide; without them, whether there is a chat template."""
    if options.conversation is not None:
        return bool(options.conversation)
    return bool(options.chat_template) or "tokenizer.chat_template" in llama.metadata


def chat(llama: Any, console: Console, options: Options) -> int:
    """Turns until the end of input, `/exit`, or with `-st` one turn. 1 when a turn failed without a terminal."""
    if options.n_predict == 0:
        console.error("a chat needs room for answers: -n 0 goes with -no-cnv only")
        return 1
    session = ChatSession(
        llama,
        console,
        arguments=sampling_arguments(options, llama) | chat_arguments(options),
        system_prompt=options.system_prompt,
        show_timings=options.show_timings,
    )
    if console.interactive and not options.single_turn:
        model = options.hf_repo or options.model or options.model_url
        console.note(f"{model}: context of {llama.n_ctx()} tokens; /help lists commands\n")
    if options.prompt:
        if options.display_prompt and console.interactive:
            console.show_message(options.prompt)
        session.ask(options.prompt)
    asked = bool(options.prompt)
    while not (options.single_turn and asked):
        line = console.read_message()
        if line is None or not session.handle(line):
            break
        asked = asked or (bool(line.strip()) and not line.startswith("/"))
    return 1 if session.failed and not console.interactive else 0


def complete(llama: Any, console: Console, options: Options) -> int:
    """Continue the prompt (or, without one, the text on standard input) once."""
    prompt = options.prompt
    if not prompt and not console.interactive:
        prompt = sys.stdin.read()
    if not prompt:
        console.error("completion needs a text: give -p, -f or standard input")
        return 1
    if options.display_prompt:
        console.write(prompt)
    if options.n_predict == 0:
        console.write("\n")
        return 0
    arguments = sampling_arguments(options, llama)

    def start() -> Any:
        return llama.create_completion(prompt, stream=True, **arguments)

    try:
        answer = stream_answer(llama, start, console.write, Interrupter())
    except PyllamaError as error:
        console.write("\n")
        console.error(str(error))
        return 1
    console.write("\n")
    if options.show_timings:
        console.note(str(answer.speed))
    return INTERRUPTED if answer.interrupted else 0


if __name__ == "__main__":
    run()
