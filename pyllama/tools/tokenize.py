"""`llama-tokenize`: the tokens of a text, one a line or as a list. Reads the vocabulary only, not the weights."""

import os
import sys
from collections.abc import Sequence

from pyllama.download.model_options import choose_model
from pyllama.errors import InvalidArgument
from pyllama.options import Options, parse_options
from pyllama.options.values import process_escapes
from pyllama.tokenizer import Tokenizer

from .command_line import run_command


def main(argv: Sequence[str]) -> int:
    options = parse_options("llama-tokenize", argv, os.environ)
    text = text_of(options)
    tokenizer = read_tokenizer(options)
    add_special = tokenizer.add_bos and not options.no_bos
    tokens = tokenizer.encode(text, add_special=add_special, parse_special=not options.no_parse_special)
    out = sys.stdout.buffer  # a token may be a part of a character
    if options.ids:
        out.write(f"{tokens}\n".encode())
    else:
        for token in tokens:
            out.write(b"%6d -> '%s'\n" % (token, tokenizer.piece(token, special=True)))
    if options.show_count:
        out.write(b"Total number of tokens: %d\n" % len(tokens))
    return 0


def run() -> None:
    run_command(main)


def text_of(options: Options) -> str:
    """Raises `InvalidArgument` when neither -p, -f, -bf nor --stdin gave one."""
    if options.stdin:
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
        return process_escapes(text) if options.escape else text
    if not any(options.given(dest) for dest in ("prompt", "file", "binary_file")):
        raise InvalidArgument("no text given; use -p TEXT, -f FILE or --stdin")
    return str(options.prompt)


def read_tokenizer(options: Options) -> Tokenizer:
    from pyllama._engine import GgufFile

    file = GgufFile(choose_model(options, os.environ).fetch(), metadata_only=True)
    try:
        return Tokenizer.from_metadata({**file.metadata, **dict(options.override_kv)})
    finally:
        file.close()


if __name__ == "__main__":
    run()
