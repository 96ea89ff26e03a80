"""What the file tools share: argument errors and failures as one line and exit code 1, progress, safe printing."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from pyllama.errors import PyllamaError

INTERRUPTED = 130


class ArgumentParser(argparse.ArgumentParser):
    """Ends with one line and code 1 for bad usage. Options are not abbreviated: a prefix may mean another one later."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(1)


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Exit with the code of `main(argv)`. Ctrl-C is 130; a reader of our output that has gone is no message."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names in files may hold what the terminal lacks
    try:
        code = main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # Python would complain once more while flushing at exit: give it a sink.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (PyllamaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


@contextmanager
def byte_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal; the function given is called with the number of further bytes done."""
    if not sys.stderr.isatty():
        yield lambda n_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # lines for a file or a pipe must not end up on stderr
    ) as progress:
        task = progress.add_task(label, total=total)
        yield lambda n_bytes: progress.advance(task, n_bytes)


def printable(text: str) -> str:
    """Text from a file, safe for a terminal: control and format characters, backslashes and bytes that are not UTF-8
    (lone surrogates here) as escapes."""
    return "".join(char if char.isprintable() and char != "\\" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # the byte itself
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x80:
        return char.encode("unicode_escape").decode("ascii")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
