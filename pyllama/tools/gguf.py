"""`llama-gguf COMMAND ...`: the GGUF file tools under one name. Each is installed under its usual name as well."""

import sys
from collections.abc import Callable, Sequence

from . import gguf_check, gguf_dump, gguf_hash, gguf_metadata, gguf_split
from .command_line import run_command

COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "dump": ("show metadata and tensors", gguf_dump.main),
    "check": ("check containers and data from the first byte to the last", gguf_check.main),
    "split": ("cut a model into parts", lambda argv: gguf_split.main(["--split", *argv])),
    "merge": ("join parts to one file", lambda argv: gguf_split.main(["--merge", *argv])),
    "hash": ("checksums of tensor data", gguf_hash.main),
    "set-metadata": ("change one value in place", gguf_metadata.main_set),
    "new-metadata": ("write a copy with other metadata", gguf_metadata.main_new),
}


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]][1](argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        print("usage: llama-gguf COMMAND ...   (COMMAND --help tells more)\n")
        for name, (summary, _) in COMMANDS.items():
            print(f"  {name:<13} {summary}")
        return 0
    found = f"'{argv[0]}' is no command" if argv else "no command given"
    print(f"error: {found}, expected one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 1


def run() -> None:
    run_command(main)


if __name__ == "__main__":
    run()
